// The parts of a report that react: charts, mistakes, maps of position and attention, the table of all rows.
const DATA = JSON.parse(document.getElementById("data").textContent);
const CHARTS = JSON.parse(document.getElementById("charts").textContent);
const $ = (id) => document.getElementById(id);
const redraws = []; // functions to call when the colors change
let PICTURES = null; // pictures.json.gz, see `collect_pictures`

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function options(id, entries, kept = $(id).value) {
  $(id).replaceChildren(...entries.map(([value, text]) => make("option", { value, textContent: text })));
  if (entries.some(([value]) => String(value) === String(kept))) $(id).value = kept;
}

const listen = (ids, then, event = "change") => ids.forEach((id) => $(id).addEventListener(event, then));
const hide = (...ids) => ids.forEach((id) => ($(id).hidden = true));
const unique = (values) => [...new Set(values)];
const area = (name) => name.split("x").reduce((a, b) => a * Number(b), 1);
const bySize = (names) => unique(names).sort((a, b) => area(a) - area(b) || parseInt(a, 10) - parseInt(b, 10));
const word = (name) => DATA.words[name] || name; // the name of a class in words
const className = (at) => (at < 0 ? "a class not in the data" : DATA.predicted[at]);
const short = (value) => (Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4))));
const percent = (share) => `${short(100 * share)} %`;
const isDark = () => document.documentElement.dataset.theme === "dark";

// Charts
async function chart(id, spec, values, title) {
  $(id).hidden = !values.length;
  if (!values.length) return;
  const css = getComputedStyle(document.documentElement), [ink, soft, line] = ["--ink", "--soft", "--line"].map((name) => css.getPropertyValue(name).trim());
  const text = { labelColor: ink, titleColor: ink, titleFontWeight: "normal" };
  const config = { background: "transparent", font: "system-ui, sans-serif", view: { stroke: null }, axis: { ...text, gridColor: line, domainColor: soft, tickColor: soft }, legend: text };
  const how = { mode: "vega-lite", renderer: "svg", config, actions: { export: true, source: false, compiled: false, editor: false }, downloadFileName: title };
  await vegaEmbed($(id), { ...spec, description: title, datasets: { values } }, how);
  for (const svg of $(id).querySelectorAll("svg")) {
    if (svg.closest("summary")) svg.setAttribute("aria-hidden", "true");
    else for (const [name, value] of [["role", "img"], ["aria-label", title]]) svg.setAttribute(name, value);
  }
}

function drawCurves() {
  const metric = $("metric").value, name = $("metric").selectedOptions[0].textContent;
  const drawn = DATA.protocols.map((protocol, at) => {
    const title = `${name} against image size, ${protocol} protocol`;
    $(`curves-${at}-title`).textContent = title;
    return chart(`curves-${at}`, CHARTS.metric[metric], DATA.points.filter((point) => point.protocol === protocol), title);
  });
  return Promise.all(drawn);
}

function drawSpeed() {
  const protocol = $("speed-protocol").value;
  return chart("speed-chart", CHARTS.speed, DATA.points.filter((point) => point.protocol === protocol), `${DATA.heading} against throughput, ${protocol} protocol`);
}

function drawTranslation() {
  const place = $("translation-at").value;
  const values = DATA.translation.filter((line) => `${line.img_size}, ${line.protocol}` === place);
  return chart("translation-chart", CHARTS.translation, values, `${DATA.heading} with the content translated, ${place}`);
}

// Accuracy by class: the classes whose accuracy changes most between the training size and the chosen one.
const MOST_CLASSES = 30;

function classChanges() {
  const [curve, protocol, size] = ["class-curve", "class-protocol", "class-size"].map((id) => $(id).value);
  const at = (name) => DATA.classes.rows.find((row) => row.curves.includes(curve) && row.protocol === protocol && row.img_size === name);
  const home = DATA.trained[DATA.curves.find((one) => one.name === curve).label], [before, after] = [at(home), at(size)];
  if (!before || !after) return [];
  const share = (row, i) => (row.n[i] ? (100 * row.hits[i]) / row.n[i] : null);
  return DATA.classes.names
    .map((name, i) => ({ class: word(name), before: share(before, i), after: share(after, i), n: after.n[i] }))
    .filter((one) => one.before !== null && one.after !== null)
    .map((one) => ({ ...one, change: one.after - one.before }))
    .sort((a, b) => a.change - b.change);
}

function drawClasses() {
  const all = classChanges(), changes = all.filter((one) => one.change !== 0), half = MOST_CLASSES / 2;
  const shown = changes.length > MOST_CLASSES ? [...changes.slice(0, half), ...changes.slice(-half)] : changes;
  const lose = changes.filter((one) => one.change < 0).length;
  const cut = shown.length < changes.length ? ` Shown are the ${half} that lose most and the ${half} that gain most.` : "";
  $("class-note").textContent = all.length ? `${lose} of ${all.length} classes lose, ${changes.length - lose} gain, ${all.length - changes.length} stay the same.${cut}` : "There are no counts for this choice.";
  return chart("class-chart", { ...CHARTS.classes, height: 20 + 18 * shown.length }, shown, `Change of each class's ${DATA.title}`);
}

// Images whose prediction changes
function fill(id, caption, head, lines) {
  const titles = make("tr", {}, ...head.map((textContent) => make("th", { scope: "col", textContent })));
  const body = lines.map((cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell))));
  $(id).replaceChildren(make("caption", { textContent: caption }), make("thead", {}, titles), make("tbody", {}, ...body));
  $(id).closest(".scroll").hidden = !lines.length;
}

// A class's readable name, with its name in the data as the tooltip.
const classText = (name, before = "") => make("span", { textContent: before + word(name), ...(word(name) === name ? {} : { title: name }) });

function drawChanged() {
  const curve = $("changed-curve").value, protocol = $("changed-protocol").value, found = DATA.changed.find((one) => one.curve === curve && one.protocol === protocol);
  const images = found ? found.images : [], thumbnails = PICTURES ? PICTURES.thumbnails : {};
  const lines = images.map(({ image, predicted }) => {
    const [name, label] = DATA.images[image], source = thumbnails[name];
    const picture = source ? make("img", { src: source, alt: `${name}, ${word(className(label))}` }) : "";
    return [picture, make("span", { textContent: name.replace(/^.*\//, ""), title: name }), classText(className(label)), ...predicted.map((one) => classText(className(one), one === label ? "✓ " : "✗ "))];
  });
  fill("changed", `Images whose prediction changes with size: ${curve}, ${protocol} protocol`, ["image", "name", "class", ...(found ? found.sizes : []).map((size) => `${size} px`)], lines);
  const few = found && images.length < found.changed ? `; shown are ${images.length}, first those that are right at the training size and wrong at most others` : "";
  $("changed-note").textContent = found ? `${short(found.changed)} of ${short(found.of)} images (${((100 * found.changed) / found.of).toFixed(1)} %) change${few}. ✓: right, ✗: wrong.` : "";
}

// Pictures of numbers
const bytesOf = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
const TWO_HUES = { false: [[0, 57, 92], [74, 159, 208], [255, 255, 255], [229, 138, 78], [122, 47, 0]], true: [[154, 215, 255], [47, 143, 201], [22, 24, 27], [213, 117, 46], [255, 210, 154]] };
const ONE_HUE = { false: [0, 90, 150], true: [245, 190, 80] };

function mixed(stops, share) {
  const at = Math.max(0, Math.min(1, share)) * (stops.length - 1), i = Math.min(stops.length - 2, Math.floor(at));
  return stops[i].map((low, k) => Math.round(low + (stops[i + 1][k] - low) * (at - i)));
}

// Colors of values: from -top to top in two hues, from 0 to top in one; over a picture they are transparent where they are 0.
const diverging = (top) => (value) => `rgb(${mixed(TWO_HUES[isDark()], (value / top + 1) / 2)})`;
const overTwo = (top) => (value) => `rgba(${mixed(TWO_HUES[isDark()], value < 0 ? 0.15 : 0.85)}, ${Math.min(1, Math.abs(value) / top)})`;
const overOne = (top) => (value) => `rgba(${ONE_HUE[isDark()]}, ${0.9 * Math.min(1, value / top)})`;
const gray = () => "#9e9e9e";

function colorBar(id, color, low, high, unit) {
  const stops = Array.from({ length: 21 }, (_, i) => color(low + ((high - low) * i) / 20));
  $(id).replaceChildren(make("span", { textContent: short(low) }), make("i", { style: `background: linear-gradient(to right, ${stops})` }), make("span", { textContent: `${short(high)} ${unit}` }));
}

// Draws grid [rows][columns], null: nothing, on a canvas. box: an outlined cell or area [row, column, rows, columns].
function paint(canvas, grid, color, { box = null, image = null, faded = false } = {}) {
  const [h, w] = [grid.length, grid[0].length], cell = Math.max(4, Math.floor(420 / Math.max(h, w))), pen = canvas.getContext("2d");
  Object.assign(canvas, { width: w * cell, height: h * cell, grid });
  canvas.style.backgroundImage = image ? `url(${image})` : "";
  if (faded && image) {
    pen.fillStyle = isDark() ? "rgba(22,24,27,0.65)" : "rgba(255,255,255,0.65)";
    pen.fillRect(0, 0, w * cell, h * cell);
  }
  grid.forEach((row, y) => row.forEach((value, x) => {
    if (value === null) return;
    pen.fillStyle = color(value);
    pen.fillRect(x * cell, y * cell, cell, cell);
  }));
  if (!box) return;
  for (const [width, stroke] of [[5, isDark() ? "#000" : "#fff"], [2.5, isDark() ? "#fff" : "#000"]]) {
    Object.assign(pen, { lineWidth: width, strokeStyle: stroke });
    pen.strokeRect(box[1] * cell, box[0] * cell, box[3] * cell, box[2] * cell);
  }
}

// A figure with a caption, a canvas, and the value under the pointer. says(row, column, value): its text. moved(row, column, by):
// called for a clicked cell, or with by = [down, right] for an arrow key.
function picture(parent, id, name, says, moved = null) {
  const canvas = make("canvas", { id, role: "img", "aria-label": name, ...(moved ? { tabIndex: 0 } : {}) }), caption = make("b", { textContent: name }), value = make("small");
  const whole = make("figure", {}, make("figcaption", {}, caption), canvas, value);
  const cellAt = (event) => {
    const { left, top, width, height } = canvas.getBoundingClientRect(), [h, w] = [canvas.grid.length, canvas.grid[0].length];
    const [y, x] = [((event.clientY - top) / height) * h, ((event.clientX - left) / width) * w].map(Math.floor);
    return [Math.max(0, Math.min(h - 1, y)), Math.max(0, Math.min(w - 1, x))];
  };
  canvas.addEventListener("pointermove", (event) => {
    const [y, x] = cellAt(event), under = canvas.grid[y][x];
    value.textContent = under === null ? "" : says(y, x, under);
  });
  canvas.addEventListener("pointerleave", () => (value.textContent = ""));
  if (moved) {
    canvas.addEventListener("click", (event) => moved(...cellAt(event)));
    canvas.addEventListener("keydown", (event) => {
      const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      moved(0, 0, by);
    });
  }
  $(parent).append(whole);
  return { whole, canvas, caption };
}

// One line for each model that a section cannot show, and why.
function others(id, kind, why) {
  const left = PICTURES.models.filter((model) => !model[kind].length);
  $(id).textContent = left.map((model) => `${model.label} is not shown: ${model.error || why(model)}.`).join(" ");
}

const modelsWith = (kind) => [...PICTURES.models.entries()].filter(([, model]) => model[kind].length).map(([at, model]) => [at, model.label]);
const modelOf = (id) => PICTURES.models[$(id).value];
const nearestPatch = (value, n, step) => {
  const first = step >> 1, last = Math.floor((n - 1 - first) / step);
  return Math.min(n - 1, first + step * Math.max(0, Math.min(last, Math.round((value - first) / step))));
};
const isNegligible = (model, layer) => (model.shares?.[layer] ?? 1) < DATA.negligible;

// What position adds to the logits, by offset: a picture per head.
const latticeParts = (model) => model.lattices.filter((item) => item.layer === Number($("lattice-layer").value));

function changeLatticeModel() {
  const model = modelOf("lattice-model"), layers = unique(model.lattices.map((item) => item.layer)).sort((a, b) => a - b);
  options("lattice-layer", layers.map((layer) => [layer, model.layers[layer]]));
  changeLatticeLayer();
}

function changeLatticeLayer() {
  const items = latticeParts(modelOf("lattice-model")), policies = unique(items.map((item) => item.policy)).filter((name) => name !== "none");
  options("lattice-policy", policies.map((name) => [name, name]));
  $("lattice-policy").closest("label").hidden = policies.length < 2;
  options("lattice-size", bySize(items.map((item) => item.size)).map((size) => [size, `${size} px`]), $("lattice-size").value || modelOf("lattice-model").train_size);
  drawLattice();
}

function drawLattice() {
  const model = modelOf("lattice-model"), layer = Number($("lattice-layer").value), size = $("lattice-size").value;
  const at = (name) => {
    const here = latticeParts(model).filter((item) => item.size === name);
    return here.find((item) => item.policy === $("lattice-policy").value) || here.find((item) => item.policy === "none") || here[0];
  };
  const item = at(size), trained = at(model.train_size), [heads, rows, columns] = item.shape;
  const top = Math.max(1, ...model.lattices.flatMap((other) => other.scale)), negligible = isNegligible(model, layer);
  const steps = new Int8Array(bytesOf(PICTURES.blobs[item.values]).buffer), color = negligible ? gray : diverging(top);
  const outside = trained && (item.window[0] > trained.window[0] || item.window[1] > trained.window[1]);
  const reach = outside && trained.window.map((n, axis) => Math.min(n - 0.5, [rows, columns][axis] / 2));
  const box = reach && [rows / 2 - reach[0], columns / 2 - reach[1], 2 * reach[0], 2 * reach[1]];
  const down = (rows - 1) / 2, right = (columns - 1) / 2;
  $("lattice").replaceChildren();
  for (let head = 0; head < heads; head += 1) {
    const value = (y, x) => ((step) => (step === -128 ? null : (step / 127) * item.scale[head]))(steps[(head * rows + y) * columns + x]);
    const grid = Array.from({ length: rows }, (_, y) => Array.from({ length: columns }, (_, x) => value(y, x)));
    const name = `head ${head}${negligible ? ": negligible" : ""}`;
    paint(picture("lattice", `lattice-${head}`, name, (y, x, logit) => `${y - down} down, ${x - right} right: ${short(logit)}`).canvas, grid, color, { box });
  }
  if (negligible) $("lattice-bar").replaceChildren();
  else colorBar("lattice-bar", color, -top, top, "logits");
  const words = [`${model.layers[layer]} at ${size} px${item.policy === "none" ? "" : `, ${item.policy}`}: offsets within ±${down} × ±${right} tokens.`];
  if (model.shares?.[layer] !== undefined) words.push(`Position makes up ${percent(model.shares[layer])} of the logits of this layer${negligible ? ": negligible" : ""}.`);
  if (item.full[0] > rows || item.full[1] > columns) words.push(`Larger offsets, up to ±${(item.full[0] - 1) / 2} × ±${(item.full[1] - 1) / 2}, are not drawn.`);
  if (outside) words.push(`The outline encloses the offsets at ${model.train_size}; offsets outside it did not occur in training.`);
  $("lattice-note").textContent = words.join(" ");
}

function startLattices() {
  const shown = modelsWith("lattices");
  if (!shown.length) return hide("lattices");
  options("lattice-model", shown);
  others("lattice-others", "lattices", (model) => (model.acts ? "its layers exceed the size limit of this page" : "position adds nothing to its attention logits"));
  listen(["lattice-model"], changeLatticeModel);
  listen(["lattice-layer"], changeLatticeLayer);
  listen(["lattice-policy", "lattice-size"], drawLattice);
  changeLatticeModel();
  redraws.push(drawLattice);
}

// Similarity of position embeddings: for every size, the cosine with the embedding of one patch.
let similarPlace = [0.5, 0.5]; // of the patch, as shares of height and width

function drawSimilarity() {
  const model = modelOf("similarity-model"), items = bySize(model.similar.map((item) => item.size)).map((size) => model.similar.find((item) => item.size === size));
  const held = document.activeElement?.id;
  $("similarity-figures").replaceChildren();
  for (const [number, item] of items.entries()) {
    const { grid: [h, w], step } = item, steps = new Int8Array(bytesOf(PICTURES.blobs[item.values]).buffer);
    const [y, x] = [h, w].map((n, axis) => nearestPatch(similarPlace[axis] * n - 0.5, n, step)), at = item.queries.indexOf(y * w + x);
    const grid = Array.from({ length: h }, (_, row) => Array.from({ length: w }, (_, column) => steps[at * h * w + row * w + column] / 127));
    const move = (row, column, by) => moveSimilarity(...(by ? [(y + by[0] * step + 0.5) / h, (x + by[1] * step + 0.5) / w] : [(row + 0.5) / h, (column + 0.5) / w]));
    const { canvas } = picture("similarity-figures", `similarity-${number}`, `${item.size} px, patch at row ${y}, column ${x}`, (row, column, cosine) => `row ${row}, column ${column}: ${short(cosine)}`, move);
    paint(canvas, grid, diverging(1), { box: [y, x, 1, 1] });
    if (canvas.id === held) canvas.focus();
  }
  colorBar("similarity-bar", diverging(1), -1, 1, "cosine");
}

function moveSimilarity(...place) {
  similarPlace = place.map((share) => Math.min(0.999, Math.max(0, share)));
  drawSimilarity();
}

function startSimilarity() {
  const shown = modelsWith("similar");
  if (!shown.length) return hide("similarity");
  options("similarity-model", shown);
  listen(["similarity-model"], drawSimilarity);
  drawSimilarity();
  redraws.push(drawSimilarity);
}

// Attention of one query on a sample image: with position, without, and the difference.
const views = {};
let query = [0.5, 0.5]; // place of the query patch, as shares of height and width

function attentionItems(...ids) {
  const keys = { image: Number, layer: Number, size: String };
  return modelOf("attention-model").maps.filter((item) => ids.every((id) => item[id] === keys[id]($(`attention-${id}`).value)));
}

function changeAttention() {
  const model = modelOf("attention-model"), sorted = (values) => unique(values).sort((a, b) => a - b);
  options("attention-image", sorted(model.maps.map((item) => item.image)).map((image) => [image, `${image + 1}: ${word(model.images[image])}`]));
  const layers = sorted(attentionItems("image").map((item) => item.layer));
  options("attention-layer", layers.map((layer) => [layer, model.layers[layer]]), $("attention-layer").value || layers.at(-1));
  options("attention-size", bySize(attentionItems("image", "layer").map((item) => item.size)).map((size) => [size, `${size} px`]), $("attention-size").value || model.train_size);
  const [item] = attentionItems("image", "layer", "size"), heads = item.mean ? 0 : item.shape[1];
  options("attention-head", [["mean", "mean of all"], ...Array.from({ length: heads }, (_, head) => [head, String(head)])]);
  options("attention-query", [["patch", "a patch"], ...Array.from({ length: item.grid[2] }, (_, i) => [i, item.grid[2] > 1 ? `prefix token ${i + 1}` : "class token"])]);
  $("attention-query").closest("label").hidden = !item.grid[2];
  drawAttention();
}

const queryPatch = ({ grid, step }) => query.map((share, axis) => nearestPatch(share * grid[axis] - 0.5, grid[axis], step));

// {grid: [h][w] weights, prefix, padding: weights on prefix tokens and padding} of the chosen query and head; null without weights.
function attended(item, stored) {
  if (stored === null) return null;
  const levels = bytesOf(stored), [h, w, prefix] = item.grid, [, heads, slots] = item.shape, [y, x] = queryPatch(item), which = $("attention-query").value;
  const row = item.queries.indexOf(which === "patch" ? prefix + y * w + x : Number(which)), tokens = item.tokens === null ? null : item.tokens[item.windows[row]];
  const used = $("attention-head").value === "mean" ? [...Array(heads).keys()] : [Number($("attention-head").value)];
  const grid = Array.from({ length: h }, () => new Array(w).fill(tokens ? null : 0)), found = { grid, prefix: 0, padding: 0 };
  for (let slot = 0; slot < slots; slot += 1) {
    const at = tokens ? tokens[slot] : slot;
    const weight = used.reduce((sum, head) => sum + (levels[(row * heads + head) * slots + slot] / 255) * item.scale[row * heads + head], 0) / used.length;
    if (at < 0) found.padding += weight;
    else if (at < prefix) found.prefix += weight;
    else grid[Math.floor((at - prefix) / w)][(at - prefix) % w] = weight;
  }
  return found;
}

function drawAttention() {
  const model = modelOf("attention-model"), [item] = attentionItems("image", "layer", "size"), negligible = isNegligible(model, item.layer);
  const withIt = attended(item, item.weights), without = attended(item, item.content), [y, x] = queryPatch(item);
  const difference = without && withIt.grid.map((row, i) => row.map((value, j) => (value === null ? null : value - without.grid[i][j])));
  const top = Math.max(1e-6, ...item.scale), image = PICTURES.blobs[item.pictures[item.image]] || null, box = $("attention-query").value === "patch" ? [y, x, 1, 1] : null;
  const empty = withIt.grid.map((row) => row.map(() => null));
  const drawn = { image: image && [empty, gray], with: [withIt.grid, overOne(top)], without: without && [without.grid, overOne(top)], difference: difference && [difference, negligible ? () => "rgba(158,158,158,0.8)" : overTwo(top)] };
  for (const [name, view] of Object.entries(views)) {
    view.whole.hidden = !drawn[name];
    if (drawn[name]) paint(view.canvas, ...drawn[name], { box, image, faded: name !== "image" });
  }
  views.difference.caption.textContent = `difference${negligible ? ": negligible" : ""}`;
  colorBar("attention-bar", overOne(top), 0, top, "attention weight; difference ± the same");
  const words = [box ? `Query: row ${y}, column ${x} of ${item.grid[0]} × ${item.grid[1]}.` : `Query: ${$("attention-query").selectedOptions[0].textContent}.`];
  if (item.grid[2]) words.push(`${percent(withIt.prefix)} of attention goes to prefix tokens${without ? ` (${percent(without.prefix)} without position)` : ""}.`);
  if (item.tokens !== null) words.push("The query attends only inside its window.");
  if (withIt.padding > 0) words.push(`${percent(withIt.padding)} goes to padding.`);
  if (item.step > 1) words.push(`Every ${item.step}th row and column can be the query.`);
  words.push(without ? "Without position: softmax of the same queries and keys, without what position adds." : `Position adds nothing to the logits of this layer${model.similar.length ? ": its embedding is added to the tokens, see above" : ""}.`);
  $("attention-note").textContent = words.join(" ");
}

function moveQuery(row, column, by) {
  const [item] = attentionItems("image", "layer", "size"), [h, w] = item.grid, [y, x] = queryPatch(item);
  $("attention-query").value = "patch";
  query = (by ? [(y + by[0] * item.step + 0.5) / h, (x + by[1] * item.step + 0.5) / w] : [(row + 0.5) / h, (column + 0.5) / w]).map((share) => Math.min(0.999, Math.max(0, share)));
  drawAttention();
}

function startAttention() {
  const shown = modelsWith("maps");
  if (!shown.length) return hide("attention");
  for (const [name, text] of [["image", "query"], ["with", "with position"], ["without", "without position"], ["difference", "difference"]])
    views[name] = picture("attention-figures", `view-${name}`, text, (y, x, weight) => `row ${y}, column ${x}: ${short(weight)}`, moveQuery);
  options("attention-model", shown, (shown.find(([at]) => PICTURES.models[at].acts) || shown[0])[0]);
  others("attention-others", "maps", () => "its layers exceed the size limit of this page");
  listen(["model", "image", "layer", "size"].map((name) => `attention-${name}`), changeAttention);
  listen(["attention-head", "attention-query"], drawAttention);
  changeAttention();
  redraws.push(drawAttention);
}

// The table of all rows: filter, order, download.
function filterRows() {
  const words = $("row-filter").value.toLowerCase().split(/\s+/).filter(Boolean), rows = [...$("table").tBodies[0].rows];
  for (const row of rows) row.hidden = !words.every((one) => row.textContent.toLowerCase().includes(one));
  $("row-count").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows, means over seeds`;
}

function sortRows(button) {
  const head = button.closest("th"), at = head.cellIndex, down = head.ariaSort === "ascending", body = $("table").tBodies[0];
  for (const other of head.parentElement.cells) other.ariaSort = "none";
  head.ariaSort = down ? "descending" : "ascending";
  const value = (row) => row.cells[at].dataset.value ?? row.cells[at].textContent;
  const order = (a, b) => (a === "" || b === "" ? (a === "") - (b === "") : (down ? -1 : 1) * a.localeCompare(b, "en", { numeric: true }));
  const numbers = (a, b) => (down ? b - a : a - b), all = [...body.rows], isNumber = all.every((row) => value(row) !== "" && !Number.isNaN(Number(value(row))));
  body.append(...all.sort((a, b) => (isNumber ? numbers : order)(value(a), value(b))));
}

function csvText(lines) {
  const cell = (value) => {
    const text = value === null || value === undefined || Number.isNaN(value) ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  return lines.map((line) => line.map(cell).join(",")).join("\n") + "\n";
}

function saveRows() {
  const lines = [...$("table").rows].filter((row) => !row.hidden).map((row) => [...row.cells].filter((cell) => cell.offsetParent).map((cell) => cell.dataset.value ?? cell.textContent));
  const link = make("a", { href: URL.createObjectURL(new Blob([csvText(lines)], { type: "text/csv" })), download: "rows.csv" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function startRows() {
  listen(["row-filter"], filterRows, "input");
  listen(["all-columns"], () => $("table").classList.toggle("all", $("all-columns").checked));
  listen(["rows-csv"], saveRows, "click");
  $("table").tHead.addEventListener("click", (event) => event.target.tagName === "BUTTON" && sortRows(event.target));
  filterRows();
}

// The page
async function readPictures() {
  const text = $("pictures").textContent.trim();
  if (!text) return null;
  return JSON.parse(await new Response(new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
}

async function theme() {
  const name = $("theme").value || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  if (document.documentElement.dataset.theme === name) return;
  document.documentElement.dataset.theme = name;
  for (const redraw of redraws) await redraw();
}

async function startPage() {
  await theme();
  listen(["theme"], theme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
  PICTURES = await readPictures();
  for (const image of document.querySelectorAll("img[data-picture]")) image.src = PICTURES.blobs[image.dataset.picture];
  const curves = DATA.curves.map(({ name }) => [name, name]), protocols = DATA.protocols.map((name) => [name, name]);
  const parts = [[drawCurves, ["metric"], true], [drawSpeed, ["speed-protocol"], CHARTS.speed], [drawTranslation, ["translation-at"], CHARTS.translation]];
  parts.push([drawChanged, ["changed-curve", "changed-protocol"], DATA.changed.some((one) => one.images.length)]);
  parts.push([drawClasses, ["class-curve", "class-protocol", "class-size"], DATA.classes]);
  for (const id of ["changed-curve", "class-curve"]) options(id, curves);
  for (const id of ["changed-protocol", "class-protocol", "speed-protocol"]) options(id, protocols);
  options("class-size", DATA.sizes.map((size) => [size, `${size} px`]), DATA.sizes.findLast((size) => !Object.values(DATA.trained).includes(size)));
  options("translation-at", unique(DATA.translation.map((line) => `${line.img_size}, ${line.protocol}`)).map((place) => [place, place]));
  startRows();
  for (const start of [startLattices, startSimilarity, startAttention]) if (PICTURES) start();
  if (!PICTURES) hide("lattices", "similarity", "attention");
  for (const [draw, ids, shown] of parts) {
    if (!shown) {
      hide($(ids[0]).closest("section").id);
      continue;
    }
    listen(ids, draw);
    redraws.push(draw);
    await draw();
  }
  const links = [...document.querySelectorAll("main section:not([hidden])")].map((section) => make("li", {}, make("a", { href: `#${section.id}`, textContent: section.querySelector("h2").textContent })));
  $("sections").replaceChildren(...links);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((details) => (details.open = true)));
  document.documentElement.dataset.ready = "yes";
}

startPage();
