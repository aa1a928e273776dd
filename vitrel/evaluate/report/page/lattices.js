// Heat maps of what position adds to the logits by offset, one per head, with a slider over sizes.
let PICTURES = null; // what `collect_pictures` wrote

async function readPictures() {
  const text = $("pictures").textContent.trim();
  if (!text) return null;
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const bytesOf = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
const bySize = (names) => [...new Set(names)].sort((a, b) => sizeOf(a).h * sizeOf(a).w - sizeOf(b).h * sizeOf(b).w || sizeOf(a).h - sizeOf(b).h);

// A slider over named sizes; it keeps the size where the new list has it.
function sizeSlider(id, output, names, fallback) {
  const before = $(id).dataset.names ? JSON.parse($(id).dataset.names)[$(id).value] : fallback;
  $(id).dataset.names = JSON.stringify(names);
  $(id).max = Math.max(0, names.length - 1);
  $(id).value = Math.max(0, names.indexOf(names.includes(before) ? before : fallback));
  $(id).disabled = names.length < 2;
  return tellSize(id, output);
}

function tellSize(id, output) {
  const name = JSON.parse($(id).dataset.names)[$(id).value] || "";
  $(output).value = name ? `${name} px` : "";
  $(id).setAttribute("aria-valuetext", name ? `${name} pixels` : "none");
  return name;
}

// [heads][rows][columns], null where no visible pair has the offset
function latticeValues(item) {
  const [heads, rows, columns] = item.shape, steps = new Int8Array(bytesOf(item.values).buffer);
  return Array.from({ length: heads }, (_, head) => Array.from({ length: rows }, (_, row) => Array.from({ length: columns }, (_, column) => {
    const step = steps[(head * rows + row) * columns + column];
    return step === -128 ? null : (step / 127) * item.scale[head];
  })));
}

const latticeModel = () => PICTURES.models[$("lattice-model").value];
const latticePolicies = (model) => [...new Set(model.lattices.map((item) => item.policy))];

// A size at which policies make no difference belongs to all of them.
function latticeAt(model, policy, layer, size) {
  const here = model.lattices.filter((item) => item.layer === layer && item.size === size);
  return here.find((item) => item.policy === policy) || here.find((item) => item.policy === "none") || here[0];
}

function latticeSizes(model, policy, layer) {
  return bySize(model.lattices.filter((item) => item.layer === layer && (item.policy === policy || item.policy === "none")).map((item) => item.size));
}

let latticeFigure = null, latticeDrawn = null;

function changeLatticeModel() {
  const model = latticeModel(), policies = latticePolicies(model);
  const real = policies.filter((policy) => policy !== "none");
  options($("lattice-policy"), (real.length ? real : policies).map((policy) => [policy, policy]), $("lattice-policy").value);
  const layers = [...new Set(model.lattices.map((item) => item.layer))].sort((a, b) => a - b);
  options($("lattice-layer"), layers.map((layer) => [layer, model.layers[layer]]), $("lattice-layer").value);
  changeLattice();
}

function changeLattice() {
  const model = latticeModel();
  if (model.lattices.length) sizeSlider("lattice-size", "lattice-at", latticeSizes(model, $("lattice-policy").value, Number($("lattice-layer").value)), model.train_size);
  drawLattice();
}

function drawLattice() {
  const model = latticeModel();
  latticeFigure.whole.hidden = !model.lattices.length;
  for (const id of ["lattice-policy", "lattice-layer", "lattice-size"]) $(id).closest("label").hidden = !model.lattices.length;
  if (!model.lattices.length) {
    $("lattice-note").textContent = model.error ? `Not shown: ${model.error}.` : `Not shown for ${model.label}: no layer fitted into the size of this page.`;
    return;
  }
  const size = tellSize("lattice-size", "lattice-at"), policy = $("lattice-policy").value, layer = Number($("lattice-layer").value);
  const item = latticeAt(model, policy, layer, size), trained = latticeAt(model, policy, layer, model.train_size);
  const top = Math.max(1e-9, ...model.lattices.filter((other) => other.layer === layer).flatMap((other) => other.scale));
  const values = latticeValues(item), [heads, rows, columns] = item.shape;
  latticeDrawn = { item, values };
  latticeFigure.caption.textContent = `${model.label}, ${model.layers[layer]}, ${size} px${item.policy === "none" ? "" : `, ${item.policy}`}`;
  draw(latticeFigure.plot, values.map((z, head) => heatMap(z, head, rows, columns, top)), latticeLayout(heads, rows, columns, item, trained, top));
  const words = [`${heads} heads of ${model.layers[layer]} at ${size}: offsets within ±${(rows - 1) / 2} × ±${(columns - 1) / 2} tokens.`];
  if (top <= 1e-9) words.push("Position adds nothing to the logits of this layer.");
  if (item.full[0] > rows || item.full[1] > columns) words.push(`Larger offsets, up to ±${(item.full[0] - 1) / 2} × ±${(item.full[1] - 1) / 2}, are not drawn.`);
  if (trained && (item.window[0] > trained.window[0] || item.window[1] > trained.window[1])) words.push(`The outline is what ${model.train_size} had: everything beyond it was never trained.`);
  words.push("Averaged over the sample images; kept in steps of 1/127 of each head's largest value.");
  $("lattice-note").textContent = words.join(" ");
}

const span = (n) => Array.from({ length: n }, (_, i) => i - (n - 1) / 2);

function heatMap(z, head, rows, columns, top) {
  const at = head ? String(head + 1) : "";
  return {
    type: "heatmap", z, x: span(columns), y: span(rows), xaxis: `x${at}`, yaxis: `y${at}`, zmin: -top, zmax: top, zmid: 0, colorscale: diverging(),
    hovertemplate: `head ${head}<br>%{y} down, %{x} right<br>%{z:.3f}<extra></extra>`, hoverongaps: false, showscale: head === 0,
    colorbar: { thickness: 12, outlinewidth: 0, len: 1, ...colorbarSide() },
  };
}

const narrow = () => latticeFigure.plot.clientWidth < 560;

function colorbarSide() {
  if (narrow()) return { orientation: "h", x: 0.5, xanchor: "center", y: 1, yanchor: "bottom", ypad: 28, title: { text: "" } };
  return { orientation: "v", x: 1.02, xanchor: "left", y: 0.5, yanchor: "middle", ypad: 10, title: { text: "logit", side: "top" } };
}

function latticeLayout(heads, rows, columns, item, trained, top) {
  const across = Math.min(heads, narrow() ? 2 : 4), down = Math.ceil(heads / across), gap = 0.05;
  const cellWidth = (latticeFigure.plot.clientWidth - (narrow() ? 60 : 150)) / across;
  const cellHeight = Math.min(1.5 * cellWidth, Math.max(0.4 * cellWidth, cellWidth * rows / columns), 330);
  const how = layout({ height: down * (cellHeight + 50) + (narrow() ? 100 : 64), margin: { l: 46, r: 12, t: narrow() ? 84 : 28, b: 44 }, shapes: [], annotations: [] });
  const width = (1 - gap * (across - 1)) / across, rise = 50 / (cellHeight + 50);
  for (let head = 0; head < heads; head += 1) {
    const row = Math.floor(head / across), column = head % across, at = head ? String(head + 1) : "";
    const left = column * (width + gap), bottom = 1 - (row + 1) / down, high = (1 - rise) / down;
    how[`xaxis${at}`] = { ...how.xaxis, domain: [left, left + width], anchor: `y${at}`, showgrid: false, title: row === down - 1 ? { text: "right" } : { text: "" } };
    how[`yaxis${at}`] = { ...how.yaxis, domain: [bottom, bottom + high], anchor: `x${at}`, showgrid: false, autorange: "reversed", showticklabels: column === 0, title: column ? { text: "" } : { text: "down" } };
    how.annotations.push({ text: `head ${head}`, x: left, xref: "paper", y: bottom + high, yref: "paper", xanchor: "left", yanchor: "bottom", showarrow: false });
    if (!trained) continue;
    const [y, x] = trained.window.map((n) => n - 0.5);
    if (y < rows / 2 || x < columns / 2) {
      const box = { x0: -Math.min(x, columns / 2), x1: Math.min(x, columns / 2), y0: -Math.min(y, rows / 2), y1: Math.min(y, rows / 2) };
      how.shapes.push({ type: "rect", xref: `x${at}`, yref: `y${at}`, ...box, line: { color: colours().ink, width: 1.5 } });
    }
  }
  return how;
}

function latticeCsv() {
  const { item, values } = latticeDrawn, [heads, rows, columns] = item.shape, lines = [["head", "down", "right", "logit"]];
  for (let head = 0; head < heads; head += 1)
    span(rows).forEach((down, i) => span(columns).forEach((right, j) => lines.push([head, down, right, values[head][i][j]])));
  return lines;
}

function startLattices() {
  latticeFigure = figure($("lattice"), "lattice-plot", latticeCsv);
  options($("lattice-model"), PICTURES.models.map((model, at) => [at, model.label]));
  const full = PICTURES.models.findIndex((model) => model.lattices.some((item) => item.scale.some((scale) => scale > 0)));
  $("lattice-model").value = Math.max(0, full);
  $("lattice-model").addEventListener("change", changeLatticeModel);
  $("lattice-policy").addEventListener("change", changeLattice);
  $("lattice-layer").addEventListener("change", changeLattice);
  $("lattice-size").addEventListener("input", drawLattice);
  changeLatticeModel();
  redraws.push(drawLattice);
}
