// Curves against resolution, and the choice of curves, which other sections use too.
// Markers that exist both in plotly and as text.
const MARKS = [["circle", "●"], ["square", "■"], ["diamond", "◆"], ["triangle-up", "▲"], ["triangle-down", "▼"], ["star", "★"], ["cross", "✚"], ["x", "✖"]];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const chosen = new Map(); // curve -> index of its style, which stays the same while the curve is shown
const followers = []; // functions to call when the choice of curves changes

function style(place) {
  const round = Math.floor(place / OKABE_ITO.length);
  const [symbol, glyph] = MARKS[(place + round) % MARKS.length];
  // the first colour of the palette is too dark on a dark page
  const colour = dark() && place % OKABE_ITO.length === 0 ? "#8FA6FF" : OKABE_ITO[place % OKABE_ITO.length];
  return { colour, symbol, glyph, dash: DASHES[round % DASHES.length] };
}

function choose(curve, on) {
  if (!on) chosen.delete(curve);
  else if (!chosen.has(curve)) {
    const taken = new Set(chosen.values());
    let place = 0;
    while (taken.has(place)) place += 1;
    chosen.set(curve, place);
  }
}

const rowsOf = (curve, protocol) => DATA.curves[curve].rows.map((at) => DATA.rows[at]).filter((row) => row.protocol === protocol);

function chooseSet(name) {
  const all = DATA.curves.map((_, curve) => curve);
  const mean = (curve) => {
    const rows = rowsOf(curve, DATA.protocols[0]);
    return rows.reduce((sum, row) => sum + row.top1, 0) / Math.max(1, rows.length);
  };
  const sets = {
    top: () => [...all].sort((a, b) => mean(b) - mean(a)).slice(0, 7).sort((a, b) => a - b),
    unresized: () => all.filter((curve) => DATA.curves[curve].rows.every((at) => unresized(DATA.rows[at]))),
    all: () => all,
    none: () => [],
  };
  chosen.clear();
  for (const curve of sets[name]()) choose(curve, true);
}

function legend() {
  const wanted = $("curve-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const items = DATA.curves.flatMap((curve, at) => {
    if (!wanted.every((word) => curve.name.toLowerCase().includes(word))) return [];
    const box = make("input", { type: "checkbox", checked: chosen.has(at) });
    const key = make("span", { class: "key", "aria-hidden": "true" });
    const paint = () => {
      const look = chosen.has(at) ? style(chosen.get(at)) : null;
      key.textContent = look ? `─${look.glyph}─` : "";
      key.style.color = look ? look.colour : "";
    };
    box.addEventListener("change", () => {
      choose(at, box.checked);
      $("curve-set").value = "own";
      paint();
      drawCurves();
    });
    paint();
    return [make("li", {}, make("label", {}, box, key, make("span", { textContent: curve.name })))];
  });
  $("legend").replaceChildren(...(items.length ? items : [make("li", { textContent: "No curve matches." })]));
}

// The hover text of a point.
function hoverText(row, curve, metric) {
  const interval = row.intervals[metric.key];
  const seeds = `n = ${number(row.n)}, ${row.seeds} seed${row.seeds > 1 ? "s" : ""}`;
  return [
    `<b>${plain(curve.name)}</b>`,
    `${row.img_size} px: ${plain(withUnit(metric))} ${number(row[metric.key])}`,
    interval ? `95 %: ${number(interval[0])} to ${number(interval[1])}` : "no interval: one seed",
    seeds,
    `policy: ${plain(row.policy)}`,
    `resampled: ${plain(row.resized)}${row.resized_params ? `, ${number(row.resized_params)} values` : ""}`,
    row.warning ? `! ${plain(row.warning)}` : "",
  ].filter(Boolean).join("<br>");
}

function curveTraces(at, protocol, metric, dodge) {
  const curve = DATA.curves[at], look = chosen.has(at) ? style(chosen.get(at)) : null;
  const rows = rowsOf(at, protocol).filter((row) => row[metric.key] !== null && row[metric.key] !== undefined);
  const trace = (part, kind) => {
    const bars = part.map((row) => row.intervals[metric.key] || [row[metric.key], row[metric.key]]);
    const base = {
      type: "scatter", name: curve.name, x: part.map((row) => side(row.img_size) * (look ? dodge : 1)), y: part.map((row) => row[metric.key]),
      hovertext: part.map((row) => hoverText(row, curve, metric)), hoverinfo: "text", meta: { curve: at, protocol, kind },
    };
    if (!look) return { ...base, mode: kind === "square" ? "lines" : "markers", line: { color: colours().line, width: 1 }, marker: { color: colours().line, size: 4 } };
    const symbol = { square: look.symbol, wide: `${look.symbol}-open`, tall: `${look.symbol}-open-dot` }[kind];
    return {
      ...base, mode: kind === "square" ? "lines+markers" : "markers", line: { color: look.colour, width: 1.8, dash: look.dash },
      marker: { symbol, size: 9, color: look.colour, line: { width: kind === "square" ? 0.8 : 1.5, color: kind === "square" ? colours().paper : look.colour } },
      error_y: {
        type: "data", symmetric: false, thickness: 1, width: 2, color: look.colour,
        array: part.map((row, i) => bars[i][1] - row[metric.key]), arrayminus: part.map((row, i) => row[metric.key] - bars[i][0]),
      },
    };
  };
  return ["square", "wide", "tall"].flatMap((kind) => {
    const part = rows.filter((row) => shape(row.img_size) === kind).sort((a, b) => side(a.img_size) - side(b.img_size));
    return part.length ? [trace(part, kind)] : [];
  });
}

function reach(metric) {
  const drawn = [...($("others").checked ? DATA.curves.keys() : chosen.keys())];
  const shown = drawn.flatMap((curve) => DATA.curves[curve].rows.map((at) => DATA.rows[at])).filter((row) => typeof row[metric.key] === "number");
  const values = shown.flatMap((row) => row.intervals[metric.key] || [row[metric.key]]).filter((value) => !metric.log || value > 0);
  if (!values.length) return undefined;
  const scaled = metric.log ? values.map(Math.log10) : values;
  const low = Math.min(...scaled), high = Math.max(...scaled), room = (high - low || Math.abs(high) || 1) * 0.05;
  return [low - room, high + room];
}

function ticks() {
  const square = DATA.sizes.filter((size) => size.h === size.w);
  const few = square.filter((size, i) => i === 0 || Math.log2(size.h / square[i - 1].h) > 0.2 || i === square.length - 1);
  return { tickvals: few.map((size) => size.h), ticktext: few.map((size) => String(size.h)) };
}

function resolutionLayout(metric) {
  const other = DATA.sizes.some((size) => size.h !== size.w);
  const trained = trainSizes.filter((name) => SIZES.has(name));
  return layout({
    height: 400,
    xaxis: { type: "log", showgrid: false, ...ticks(), title: { text: other ? "image side, √(h·w) (px)" : "image side (px)" } },
    yaxis: { type: metric.log ? "log" : "linear", title: { text: withUnit(metric) }, range: reach(metric), ...(metric.log ? logTicks(DATA.rows.map((row) => row[metric.key]).filter((value) => value > 0)) : {}) },
    shapes: trained.map((name) => ({ type: "line", x0: side(name), x1: side(name), y0: 0, y1: 1, yref: "paper", layer: "below", line: { color: colours().soft, width: 1.2, dash: "dash" } })),
    annotations: trained.map((name) => ({
      x: Math.log10(side(name)), y: 1, yref: "paper", xanchor: "left", yanchor: "top", text: "trained", showarrow: false, font: { size: 11, color: colours().soft },
    })),
  });
}

const panels = new Map();

function drawCurves() {
  const metric = DATA.metrics.find(({ key }) => key === $("metric").value);
  const shown = new Set([...document.querySelectorAll("#protocol-choice input:checked")].map((box) => box.value));
  const grey = $("others").checked ? [...DATA.curves.keys()].filter((curve) => !chosen.has(curve)) : [];
  const order = [...chosen.keys()];
  for (const [protocol, panel] of panels) {
    panel.whole.hidden = !shown.has(protocol);
    if (panel.whole.hidden) continue;
    panel.title(`${capital(withUnit(metric))} against resolution, ${protocol} protocol, ${DATA.data}`);
    const dodge = (i) => 2 ** (0.01 * (i - (order.length - 1) / 2));
    const traces = [...grey.flatMap((curve) => curveTraces(curve, protocol, metric, 1)), ...order.flatMap((curve, i) => curveTraces(curve, protocol, metric, order.length > 10 ? 1 : dodge(i)))];
    draw(panel.plot, traces, resolutionLayout(metric));
  }
  for (const follow of followers) follow();
}

function curvesCsv(protocol) {
  const metric = DATA.metrics.find(({ key }) => key === $("metric").value);
  const lines = [...chosen.keys()].sort((a, b) => a - b).flatMap((curve) => rowsOf(curve, protocol).map((row) => {
    const [low, high] = row.intervals[metric.key] || [null, null];
    return [DATA.curves[curve].label, DATA.curves[curve].policy, protocol, row.img_size, row[metric.key], low, high, metric.unit, row.n, row.seeds, row.resized, row.resized_params];
  }));
  return [["label", "policy", "protocol", "img_size", metric.key, "low", "high", "unit", "n", "seeds", "resized", "resized_params"], ...lines];
}

function startCurves() {
  options($("metric"), DATA.metrics.map((metric) => [metric.key, withUnit(metric)]));
  for (const protocol of DATA.protocols) {
    const box = make("input", { type: "checkbox", checked: true, value: protocol });
    box.addEventListener("change", drawCurves);
    $("protocol-choice").append(make("label", { class: "check" }, box, ` ${protocol}`));
    panels.set(protocol, figure($("panels"), `curves-${protocol.replace(/\W+/g, "-")}`, () => curvesCsv(protocol)));
  }
  const few = DATA.curves.length <= 8;
  $("curve-set").value = few ? "all" : "top";
  chooseSet(few ? "all" : "top");
  legend();
  for (const id of ["metric", "others"]) $(id).addEventListener("change", drawCurves);
  $("curve-filter").addEventListener("input", legend);
  $("curve-set").addEventListener("change", () => {
    chooseSet($("curve-set").value);
    legend();
    drawCurves();
  });
  const other = DATA.sizes.filter((size) => size.h !== size.w);
  const kinds = [["wide", "hollow"], ["tall", "hollow with a dot"]].flatMap(([kind, word]) => {
    const names = other.filter((size) => shape(size.name) === kind).map((size) => size.name);
    return names.length ? [`${word}: ${names.join(", ")}`] : [];
  });
  const shapes = kinds.length ? `Lines connect square sizes; single markers are other shapes (${kinds.join("; ")}). ` : "";
  $("curves-note").textContent = `${shapes}Bars are 95 % intervals; the hover text has n, seeds, policy and resampling. Curves are shifted sideways a little so that bars do not overlap.`;
  $("protocol-choice").hidden = DATA.protocols.length < 2;
  redraws.push(drawCurves);
}

// One point per row of the chosen curves.
let throughputFigure = null;

function drawThroughput() {
  const protocol = $("throughput-protocol").value;
  const traces = [...chosen].flatMap(([at, place]) => {
    const look = style(place), curve = DATA.curves[at];
    const rows = rowsOf(at, protocol).filter((row) => row.infer_samples_per_sec > 0).sort((a, b) => side(a.img_size) - side(b.img_size));
    return rows.length ? [{
      type: "scatter", mode: "lines+markers+text", name: curve.name, x: rows.map((row) => row.infer_samples_per_sec), y: rows.map((row) => row.top1), meta: { curve: at, rows },
      text: rows.map((row) => ((size) => (size.h === size.w ? String(size.h) : row.img_size))(sizeOf(row.img_size))), textposition: ["top center", "bottom center", "middle right", "middle left"][place % 4], textfont: { size: 10, color: look.colour }, cliponaxis: false,
      hovertext: rows.map((row) => `<b>${plain(curve.name)}</b><br>${row.img_size} px: top-1 ${number(row.top1)} %<br>${number(row.infer_samples_per_sec)} images/s, batch ${row.batch_size}`), hoverinfo: "text",
      line: { color: look.colour, width: 1, dash: look.dash }, marker: { symbol: look.symbol, size: 9, color: look.colour },
    }] : [];
  });
  throughputFigure.title(`Top-1 against throughput, ${protocol} protocol, ${DATA.data}`);
  draw(throughputFigure.plot, traces, layout({
    height: 440, margin: { l: 58, r: 36, t: 24, b: 46 }, xaxis: { type: "log", title: { text: "throughput (images/s)" }, ...logTicks(DATA.rows.map((row) => row.infer_samples_per_sec).filter((value) => value > 0)), showgrid: false }, yaxis: { title: { text: "top-1 (%)" } },
  }));
}

function throughputCsv() {
  const lines = throughputFigure.plot.data.flatMap(({ meta }) => meta.rows.map((row) => [DATA.curves[meta.curve].label, DATA.curves[meta.curve].policy, row.protocol, row.img_size, row.infer_samples_per_sec, row.top1]));
  return [["label", "policy", "protocol", "img_size", "images_per_s", "top1"], ...lines];
}

function startThroughput() {
  throughputFigure = figure($("throughput-figure"), "throughput-plot", throughputCsv);
  options($("throughput-protocol"), DATA.protocols.map((name) => [name, name]));
  $("throughput-protocol").closest(".controls").hidden = DATA.protocols.length < 2;
  $("throughput-protocol").addEventListener("change", drawThroughput);
  const devices = [...new Set(DATA.rows.map((row) => row.device))].join(", ");
  $("throughput-note").textContent = `Throughput of forward passes, without loading, on ${devices}. A line connects the sizes of a curve in ascending order.`;
  followers.push(drawThroughput);
}
