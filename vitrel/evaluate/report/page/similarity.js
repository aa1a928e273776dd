// Similarity of position embeddings: for every size, a map of the cosine with the embedding of one patch.
let similarityFigure = null, similarityPlace = [0.5, 0.5]; // of the patch, as shares of height and width

const similarityItems = () => {
  const model = PICTURES.models[$("similarity-model").value];
  return bySize(model.similar.map((item) => item.size)).map((size) => model.similar.find((item) => item.size === size));
};

// Row and column of the nearest recorded patch, and its index among the recorded patches.
function similarityQuery(item) {
  const { step, grid } = item, first = step >> 1;
  const [y, x] = grid.map((n, axis) => first + step * Math.max(0, Math.min(Math.floor((n - 1 - first) / step), Math.round((similarityPlace[axis] * n - 0.5 - first) / step))));
  return { y, x, at: item.queries.indexOf(y * grid[1] + x) };
}

function similarityMap(item) {
  const [h, w] = item.grid, steps = new Int8Array(bytesOf(PICTURES.blobs[item.values]).buffer), { at } = similarityQuery(item);
  return Array.from({ length: h }, (_, y) => Array.from({ length: w }, (_, x) => steps[at * h * w + y * w + x] / 127));
}

function drawSimilarity() {
  const items = similarityItems(), plot = similarityFigure.plot, small = plot.clientWidth < 560;
  const across = Math.min(items.length, small ? 2 : 4), [h, w] = items[0].grid;
  similarityFigure.title(`Cosine similarity of position embeddings: ${PICTURES.models[$("similarity-model").value].label}, ${DATA.data}`);
  const how = cells(items.map((item) => `${item.size} px, ${item.grid[0]} × ${item.grid[1]} patches`), across, h / w, plot, ["row (patches)", "column (patches)"], { r: 84 });
  if (small) how.annotations.forEach((text, i) => (text.text = `${items[i].size} px`));
  how.shapes = items.map((item, i) => {
    const { y, x } = similarityQuery(item), at = i ? i + 1 : "";
    return { type: "rect", xref: `x${at}`, yref: `y${at}`, x0: x - 0.5, x1: x + 0.5, y0: y - 0.5, y1: y + 0.5, line: { color: colours().ink, width: 2 } };
  });
  const traces = items.map((item, i) => ({
    type: "heatmap", z: similarityMap(item), xaxis: `x${i ? i + 1 : ""}`, yaxis: `y${i ? i + 1 : ""}`, zmin: -1, zmax: 1, zmid: 0, colorscale: diverging(), showscale: i === 0,
    hovertemplate: "row %{y}, column %{x}<br>cosine %{z:.2f}<extra></extra>", colorbar: { thickness: 12, outlinewidth: 0, title: { text: "cosine", side: "top" }, x: 1.01 },
  }));
  draw(plot, traces, how);
  if (!plot.listening) {
    plot.listening = true;
    plot.on("plotly_click", ({ points: [point] }) => {
      const [rows, columns] = similarityItems()[point.curveNumber].grid;
      moveSimilarity((point.y + 0.5) / rows, (point.x + 0.5) / columns);
    });
  }
  const { y, x } = similarityQuery(items[0]), model = PICTURES.models[$("similarity-model").value];
  $("similarity-note").textContent = `Outlined: row ${y}, column ${x} of ${h} × ${w} at ${items[0].size}, and the nearest recorded patch at other sizes. Trained at ${model.train_size}; at other sizes the embedding is interpolated.`;
}

function moveSimilarity(y, x) {
  const inside = (share) => Math.min(0.999, Math.max(0, share));
  similarityPlace = [inside(y), inside(x)];
  drawSimilarity();
}

function similarityKey(event) {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!moves || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  const item = similarityItems()[0], { y, x } = similarityQuery(item), { grid, step } = item;
  moveSimilarity((y + moves[0] * step + 0.5) / grid[0], (x + moves[1] * step + 0.5) / grid[1]);
}

function similarityCsv() {
  const lines = similarityItems().flatMap((item) => similarityMap(item).flatMap((row, y) => row.map((cosine, x) => [item.size, y, x, cosine])));
  return [["img_size", "row", "column", "cosine"], ...lines];
}

function startSimilarity() {
  const shown = [...PICTURES.models.entries()].filter(([, model]) => model.similar.length);
  if (!shown.length) return hide("similarity");
  similarityFigure = figure($("similarity-figure"), "similarity-plot", similarityCsv, { tabIndex: 0, role: "group", "aria-label": "cosine similarity of embeddings: arrow keys move the patch" });
  similarityFigure.plot.addEventListener("keydown", similarityKey);
  options($("similarity-model"), shown.map(([at, model]) => [at, model.label]));
  $("similarity-controls").hidden = shown.length < 2;
  $("similarity-model").addEventListener("change", drawSimilarity);
  drawSimilarity();
  redraws.push(drawSimilarity);
}
