// Attention of one query on a sample image: with position, without, and the difference.
const VIEWS = [["image", "query"], ["with", "attention, with position"], ["without", "without position"], ["difference", "difference"]];
const views = new Map();
let queryAt = null, mapCache = null; // [row, column, grid height, grid width] of the query; the decoded map

const attentionModel = () => PICTURES.models[$("attention-model").value];

function currentMap() {
  const model = attentionModel(), size = showSize("attention-size", "attention-at");
  return model.maps.find((item) => item.size === size && item.layer === Number($("attention-layer").value) && item.image === Number($("attention-image").value));
}

function changeAttentionModel() {
  const model = attentionModel(), images = [...new Set(model.maps.map((item) => item.image))].sort();
  options($("attention-image"), images.map((image) => [image, `${image + 1}: ${word(model.images[image])}`]), $("attention-image").value);
  changeAttentionImage();
}

function changeAttentionImage() {
  const model = attentionModel(), image = Number($("attention-image").value);
  const layers = [...new Set(model.maps.filter((item) => item.image === image).map((item) => item.layer))].sort((a, b) => a - b);
  const kept = $("attention-layer").value, before = kept !== "" && layers.includes(Number(kept)) ? kept : layers[layers.length - 1];
  options($("attention-layer"), layers.map((layer) => [layer, model.layers[layer]]), before);
  changeAttentionLayer();
}

function changeAttentionLayer() {
  const model = attentionModel(), image = Number($("attention-image").value), layer = Number($("attention-layer").value);
  const names = model.maps.filter((item) => item.image === image && item.layer === layer).map((item) => item.size);
  sizeSlider("attention-size", "attention-at", bySize(names), model.train_size);
  changeAttentionSize();
}

function changeAttentionSize() {
  const item = currentMap(), [h, w, prefix] = item.grid, heads = item.shape[1];
  const mean = [["mean", item.mean ? "mean of all (single heads exceed the size limit)" : "mean of all"]];
  options($("attention-head"), item.mean ? mean : [...mean, ...Array.from({ length: heads }, (_, head) => [head, String(head)])], $("attention-head").value);
  const own = Array.from({ length: prefix }, (_, i) => [i, prefix > 1 ? `prefix token ${i + 1}` : "class token"]);
  options($("attention-query"), [["patch", "a patch"], ...own], $("attention-query").value);
  $("attention-query").closest("label").hidden = !prefix;
  queryAt = queryAt ? [Math.min(h - 1, Math.floor((queryAt[0] + 0.5) * h / queryAt[2])), Math.min(w - 1, Math.floor((queryAt[1] + 0.5) * w / queryAt[3])), h, w] : [h >> 1, w >> 1, h, w];
  snap(item, 0, 0);
  drawAttention();
}

// Move to the nearest recorded query, or to the next one in a direction.
function snap(item, down, right) {
  const { step, grid: [h, w] } = item, first = step >> 1;
  const near = (value, n, move) => {
    const last = Math.floor((n - 1 - first) / step), place = Math.round((value - first) / step) + move;
    return Math.min(n - 1, first + step * Math.max(0, Math.min(last, place)));
  };
  queryAt = [near(queryAt[0], h, down), near(queryAt[1], w, right), h, w];
}

function decoded(item) {
  if (mapCache?.item !== item) mapCache = { item, with: bytesOf(item.weights), without: item.content === null ? null : bytesOf(item.content) };
  return mapCache;
}

// {grid: [h][w] weights, prefix: weight on prefix tokens, padding: weight on padding} of the chosen query and head.
function attended(item, which) {
  const levels = decoded(item)[which];
  if (levels === null) return null;
  const [h, w, prefix] = item.grid, [, heads, slots] = item.shape, chosenQuery = $("attention-query").value;
  const token = chosenQuery === "patch" ? prefix + queryAt[0] * w + queryAt[1] : Number(chosenQuery);
  const row = item.queries.indexOf(token), tokens = item.tokens === null ? null : item.tokens[item.windows[row]];
  const used = $("attention-head").value === "mean" ? Array.from({ length: heads }, (_, head) => head) : [Number($("attention-head").value)];
  const grid = Array.from({ length: h }, () => new Array(w).fill(tokens ? null : 0)), other = { prefix: 0, padding: 0 };
  for (let slot = 0; slot < slots; slot += 1) {
    const at = tokens ? tokens[slot] : slot;
    const weight = used.reduce((sum, head) => sum + (levels[(row * heads + head) * slots + slot] / 255) * item.scale[row * heads + head], 0) / used.length;
    if (at < 0) other.padding += weight;
    else if (at < prefix) other.prefix += weight;
    else grid[Math.floor((at - prefix) / w)][(at - prefix) % w] = weight;
  }
  return { grid, ...other };
}

function mapsNow() {
  const item = currentMap(), withIt = attended(item, "with"), without = attended(item, "without");
  const difference = without && withIt.grid.map((row, y) => row.map((value, x) => (value === null ? null : value - without.grid[y][x])));
  return { item, with: withIt, without, difference };
}

function overlayLayout(item, faded) {
  const [h, w] = item.grid, at = colours(), axis = { visible: false, fixedrange: true, constrain: "domain" };
  const source = PICTURES.blobs[item.pictures[item.image]];
  const picture = source && { source, xref: "x", yref: "y", x: -0.5, y: -0.5, sizex: w, sizey: h, sizing: "stretch", layer: "below", opacity: faded ? 0.35 : 1 };
  const box = $("attention-query").value === "patch" ? [{ type: "rect", x0: queryAt[1] - 0.5, x1: queryAt[1] + 0.5, y0: queryAt[0] - 0.5, y1: queryAt[0] + 0.5, line: { color: at.ink, width: 2.5 } },
    { type: "rect", x0: queryAt[1] - 0.5, x1: queryAt[1] + 0.5, y0: queryAt[0] - 0.5, y1: queryAt[0] + 0.5, line: { color: at.paper, width: 1 } }] : [];
  const width = views.get("with").plot.clientWidth || 250;
  return layout({
    height: Math.min(420, width * h / w) + 44, margin: { l: 2, r: 2, t: 2, b: 42 }, images: picture ? [picture] : [], shapes: box,
    xaxis: { ...axis, range: [-0.5, w - 0.5] }, yaxis: { ...axis, range: [h - 0.5, -0.5], scaleanchor: "x", scaleratio: 1 },
  });
}

function overlay(z, item, low, high, colorscale, bar, name) {
  return {
    type: "heatmap", z, zmin: low, zmax: high, colorscale, xgap: 0, ygap: 0, hoverongaps: false, showscale: bar,
    hovertemplate: `row %{y}, column %{x}<br>${name} %{z:.4f}<extra></extra>`,
    colorbar: { orientation: "h", thickness: 8, len: 0.9, y: -0.02, yanchor: "top", outlinewidth: 0, nticks: 4, tickformat: ".2~g" },
  };
}

const ONE_HUE = [[0, "rgba(0,114,178,0)"], [0.5, "rgba(0,114,178,0.55)"], [1, "rgba(0,70,120,0.85)"]];
const ONE_HUE_DARK = [[0, "rgba(240,180,60,0)"], [0.5, "rgba(240,180,60,0.6)"], [1, "rgba(255,225,150,0.85)"]];
const TWO_HUES = [[0, "rgba(0,57,92,0.95)"], [0.25, "rgba(0,114,178,0.7)"], [0.5, "rgba(128,128,128,0)"], [0.75, "rgba(213,94,0,0.7)"], [1, "rgba(140,50,0,0.95)"]];
const TWO_HUES_DARK = [[0, "rgba(154,215,255,0.95)"], [0.25, "rgba(47,143,201,0.7)"], [0.5, "rgba(128,128,128,0)"], [0.75, "rgba(213,117,46,0.7)"], [1, "rgba(255,210,154,0.95)"]];

function drawAttention() {
  const now = mapsNow(), { item } = now, [h, w] = item.grid;
  const flat = (grid) => grid.flat().filter((value) => value !== null);
  const top = Math.max(1e-6, ...flat(now.with.grid), ...(now.without ? flat(now.without.grid) : []));
  const most = now.difference ? Math.max(1e-6, ...flat(now.difference).map(Math.abs)) : 1;
  const clear = Array.from({ length: h }, () => new Array(w).fill(0)), hue = dark() ? ONE_HUE_DARK : ONE_HUE;
  const traces = {
    image: item.pictures.length > 0 && { ...overlay(clear, item, 0, 1, [[0, "rgba(0,0,0,0)"], [1, "rgba(0,0,0,0)"]], false, ""), hovertemplate: "row %{y}, column %{x}<extra></extra>" },
    with: overlay(now.with.grid, item, 0, top, hue, true, "weight"),
    without: now.without && overlay(now.without.grid, item, 0, top, hue, true, "weight"),
    difference: now.difference && overlay(now.difference, item, -most, most, dark() ? TWO_HUES_DARK : TWO_HUES, true, "difference"),
  };
  for (const [name, view] of views) {
    view.whole.hidden = !traces[name];
    if (!traces[name]) continue;
    view.title(name === "with" && !now.without ? "attention" : VIEWS.find(([key]) => key === name)[1]);
    draw(view.plot, [traces[name]], overlayLayout(item, name !== "image"));
    if (view.plot.listening) continue;
    view.plot.listening = true;
    view.plot.on("plotly_click", ({ points }) => moveTo(points[0].y, points[0].x));
  }
  noteAttention(now);
}

// The note below the maps: query, largest weight, prefix tokens, padding, policy.
function noteAttention({ item, with: withIt, without }) {
  const model = attentionModel(), flat = withIt.grid.flatMap((row, y) => row.map((value, x) => [value, y, x])).filter(([value]) => value !== null);
  const [value, y, x] = flat.reduce((best, one) => (one[0] > best[0] ? one : best));
  const percent = (share) => `${number(100 * share)} %`, query = $("attention-query");
  const words = [query.value === "patch" ? `Query: row ${queryAt[0]}, column ${queryAt[1]} of ${item.grid[0]} × ${item.grid[1]}.` : `Query: ${query.selectedOptions[0].textContent}.`];
  words.push(`Most attention, ${percent(value)}, goes to row ${y}, column ${x}.`);
  if (item.grid[2]) words.push(`${percent(withIt.prefix)} goes to prefix tokens${without ? ` (${percent(without.prefix)} without position)` : ""}.`);
  if (item.tokens !== null) words.push("The query attends only inside its window.");
  if (withIt.padding > 0) words.push(`${percent(withIt.padding)} goes to padding.`);
  if (item.step > 1) words.push(`Every ${item.step}th row and column can be the query.`);
  words.push(without ? "Without position: softmax of the same queries and keys with the same mask, without the position bias."
    : model.acts ? "Position adds nothing to the logits of this layer." : `Position adds nothing to the attention logits of ${model.label}${model.similar.length ? ": its embedding is added to the tokens, see above" : ""}.`);
  if (item.policy !== "none") words.push(`Policy: ${item.policy}.`);
  $("attention-note").textContent = words.join(" ");
}

function moveTo(y, x) {
  $("attention-query").value = "patch";
  queryAt = [y, x, ...queryAt.slice(2)];
  snap(currentMap(), 0, 0);
  drawAttention();
}

function attentionKey(event) {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!moves || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  $("attention-query").value = "patch";
  snap(currentMap(), ...moves);
  drawAttention();
}

function attentionCsv() {
  const { with: withIt, without, difference } = mapsNow(), lines = [["row", "column", "with_position", "without_position", "difference"]];
  withIt.grid.forEach((row, y) => row.forEach((value, x) => lines.push([y, x, value, without && without.grid[y][x], difference && difference[y][x]])));
  return lines;
}

function startAttention() {
  const shown = [...PICTURES.models.entries()].filter(([, model]) => model.maps.length);
  if (!shown.length) return hide("attention");
  for (const [name, text] of VIEWS) {
    const view = figure($("attention-panels"), `attention-${name}`, attentionCsv, { tabIndex: 0, role: "group", "aria-label": `${text}: arrow keys move the query patch` });
    view.title(text);
    view.plot.addEventListener("keydown", attentionKey);
    views.set(name, view);
  }
  options($("attention-model"), shown.map(([at, model]) => [at, model.label]), (shown.find(([, model]) => model.acts) || shown[0])[0]);
  others("attention-others", "maps", () => "its layers exceed the size limit of this page");
  const changes = { model: changeAttentionModel, image: changeAttentionImage, layer: changeAttentionLayer, head: drawAttention, query: drawAttention };
  for (const [id, change] of Object.entries(changes)) $(`attention-${id}`).addEventListener("change", change);
  $("attention-size").addEventListener("input", changeAttentionSize);
  changeAttentionModel();
  redraws.push(drawAttention);
}
