// The 2 × 2 grid on the page: fields, the three cases side by side, who looks at whom.
const storyGrids = {};

function presetNow() {
  const same = (part) => ["contents", "biases", "sign"].every((name) => String(part[name]) === String(state[name]));
  return String(state.positions) === String(DEFAULTS.positions) && Object.keys(PRESETS).find((name) => same(PRESETS[name][0]));
}

function drawPresets() {
  const now = presetNow();
  for (const button of document.querySelectorAll("[data-preset]")) button.ariaPressed = String(button.dataset.preset === now);
  say($("preset-note"), now ? PRESETS[now][1] : "Your own numbers.");
}

// The arrow in front of each bias says where the key lies, which depends on the sign of the offset.
function drawOffsets() {
  for (const label of document.querySelectorAll("[data-offset]")) {
    const at = label.dataset.offset.split(",").map(Number), sign = arrow(bySign(at));
    label.firstChild.textContent = sign;
    label.lastChild.ariaLabel = `bias of offset (${at.map(signed).join(", ")}), ${sign === "•" ? "the query itself" : `key ${sign}`}`;
  }
}

const named = (keys) => (keys.length === 4 ? "all alike" : keys.join(" or "));

// Arrows from each query to its target, a ring where it is the query itself.
function lookPicture(name, rows) {
  const cell = 52, center = (patch) => place(patch, 2).map((n) => n * cell + cell / 2 + 1);
  const patches = tokens(4, (patch) => {
    const [y, x] = center(patch);
    return `<rect class="patch" x="${x - cell / 2}" y="${y - cell / 2}" width="${cell}" height="${cell}"/><text x="${x - cell / 2 + 5}" y="${y - cell / 2 + 14}">${patch}</text>`;
  });
  const lines = rows.flatMap(({ logits }, query) => {
    const keys = targets(logits), kind = query === state.storyQuery ? "look now" : "look", [y, x] = center(query);
    return (keys.length === 4 ? [] : keys).map((key) => {
      if (key === query) return `<circle class="${kind}" cx="${x}" cy="${y}" r="10"/>`;
      const [ty, tx] = center(key), far = Math.hypot(ty - y, tx - x), [uy, ux] = [(ty - y) / far, (tx - x) / far];
      const at = (along, across) => [x + along * ux - across * uy, y + along * uy + across * ux].map((n) => n.toFixed(1)).join(" "); // beside the way back
      return `<path class="${kind}" d="M${at(12, 5)} L${at(far - 16, 5)}"/><path class="${kind} tip" d="M${at(far - 10, 5)} L${at(far - 20, 0)} L${at(far - 20, 10)}z"/>`;
    });
  });
  const label = `targets with ${CASES[name]}: ${rows.map(({ logits }, query) => `patch ${query} looks at ${named(targets(logits))}`).join(", ")}`;
  const wide = 2 * cell + 2;
  return `<svg role="img" aria-label="${label}" width="${wide}" height="${wide}" viewBox="0 0 ${wide} ${wide}">${patches.join("")}${lines.join("")}</svg>`;
}

function drawCase(name, all, top) {
  const rows = all[name], weights = state.show === "weights", size = cellSize($(`${name}-cells`), 4, 60, 76, true);
  storyGrids[name].draw({
    rows: 4, columns: 4, size, high: 44, picked: [state.storyQuery, state.storyKey],
    heads: { corner: "query ↓\nkey →", rows: ["0", "1", "2", "3"], columns: ["0", "1", "2", "3"] }, font: top >= 100 ? 11 : 13,
    cell: (query, key) => {
      const { logits, biased } = rows[query], value = weights ? biased.weights[key] : logits[key];
      const mark = targets(logits).length < 4 && targets(logits).includes(key), text = fixed(value);
      const label = `${CASES[name]}, query ${query}, key ${key}: ${text}${mark ? ", the largest of its row" : ""}`;
      return { text, label, mark, ...color(weights || value < 0 ? "down" : "up", top ? Math.abs(value) / top : 0) };
    },
  });
  const sameBias = new Set(name === "relative" ? sharing(state.storyQuery, state.storyKey).map(String) : []);
  for (const cell of storyGrids[name].all().flat()) cell.classList.toggle("alike", sameBias.has(cell.dataset.at));
  $(`${name}-look`).innerHTML = lookPicture(name, rows);
  $(`${name}-targets`).textContent = rows.map(({ logits }, query) => `${query} → ${named(targets(logits))}`).join("; ");
}

function drawStory() {
  const all = squareRows(), values = Object.values(all).flat().flatMap((row) => (state.show === "weights" ? row.biased.weights : row.logits));
  drawPresets();
  drawOffsets();
  for (const name of Object.keys(CASES)) drawCase(name, all, Math.max(...values.map(Math.abs)));
  drawReading(all);
}

function startStory() {
  for (const [name, [part]] of Object.entries(PRESETS)) {
    const button = make("button", { type: "button", "data-preset": name }, name);
    button.addEventListener("click", () => change({ positions: DEFAULTS.positions, ...part }));
    $("presets").append(button);
  }
  const field = (list, patch, at) => numberField(list, 2 * patch + at, `${list === "contents" ? "content" : "position"} of patch ${patch}, ${at ? "second" : "first"} number`);
  table($("contents"), ["patch", "x 1st", "x 2nd", "p 1st", "p 2nd"], CORNERS.map((corner, patch) => [
    `${patch} ${corner}`, field("contents", patch, 0), field("contents", patch, 1), field("positions", patch, 0), field("positions", patch, 1),
  ]));
  const steps = [-1, 0, 1];
  table($("biases"), ["Δrow ↓ Δcol →", ...steps.map(signed)], steps.map((dy) => [
    signed(dy), ...steps.map((dx) => make("span", { class: "offset", "data-offset": [dy, dx] }, make("span", { "aria-hidden": "true" }), numberField("biases", 3 * (dy + 1) + dx + 1))),
  ]));
  for (const [name, title] of Object.entries(CASES))
    storyGrids[name] = cellGrid($(`${name}-cells`), `${title}: every query and key`, { pick: (storyQuery, storyKey) => change({ storyQuery, storyKey }) });
  for (const [id, step] of [["row-before", 3], ["row-after", 1]])
    $(id).addEventListener("click", () => change({ storyQuery: (state.storyQuery + step) % 4 }));
}
