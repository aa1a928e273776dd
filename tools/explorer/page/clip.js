// Offsets along a line, limited to a radius R: every offset beyond it takes the bias of the last one.
const clipGrids = {};
const FAR = 4; // the largest radius that has a field

const lineOffset = (query, key) => (state.sign === "query" ? query - key : key - query);
const limited = (offset, radius) => Math.min(radius, Math.max(-radius, offset));

function drawClip() {
  const { length: n, radius, clipQuery: i, clipKey: j, clipBiases, sign } = state, names = tokens(n, String);
  const biasOfPair = (query, key) => clipBiases[limited(lineOffset(query, key), radius) + FAR];
  const kinds = {
    offsets: [lineOffset, signed, n - 1],
    limited: [(query, key) => limited(lineOffset(query, key), radius), signed, n - 1],
    biases: [biasOfPair, (value) => minus(String(Number(value.toFixed(2)))), Math.max(...clipBiases.map(Math.abs))],
  };
  for (const [name, [value, text, top]] of Object.entries(kinds)) {
    const size = cellSize($(`clip-${name}-cells`), n, 30, 44, true);
    clipGrids[name].draw({
      rows: n, columns: n, size, high: 34, font: size < 38 ? 11 : 13, picked: [i, j], heads: { corner: "i ↓\nj →", rows: names, columns: names },
      cell: (query, key) => {
        const number = value(query, key), beyond = Math.abs(lineOffset(query, key)) > radius;
        const label = `query ${query}, key ${key}: ${text(number)}${beyond ? ", beyond R" : ""}`;
        return { text: text(number), label, ...color(number < 0 ? "down" : "up", top ? (Math.abs(number) / top) * 0.8 : 0) };
      },
    });
  }
  for (const field of document.querySelectorAll("[data-list=clipBiases]")) field.disabled = Math.abs(Number(field.dataset.at) - FAR) > radius;
  const offset = lineOffset(i, j), clipped = limited(offset, radius), order = sign === "query" ? [i, j] : [j, i];
  const effect = clipped === offset ? `within R = ${radius}, so it keeps a bias of its own` : `beyond R = ${radius}, so it counts as ${signed(clipped)}`;
  say($("clip-said"), `Query ${i}, key ${j}: ${sign === "query" ? "i − j" : "j − i"} = ${order.join(" − ")} = ${signed(offset)} is ${effect}: bias ${short(clipBiases[clipped + FAR])}. `
    + `Clipping needs 2R + 1 = ${2 * radius + 1} learned values per head; one for every offset would be 2L − 1 = ${2 * n - 1}.`);
}

function startClip() {
  for (let offset = -FAR; offset <= FAR; offset += 1)
    $("clip-fields").append(make("label", {}, signed(offset), numberField("clipBiases", offset + FAR, `bias of offset ${signed(offset)}`)));
  for (const [name, title] of [["offsets", "Offsets"], ["limited", "Offsets limited to R"], ["biases", "Biases"]])
    clipGrids[name] = cellGrid($(`clip-${name}-cells`), `${title} of every query and key`, { pick: (clipQuery, clipKey) => change({ clipQuery, clipKey }) });
}
