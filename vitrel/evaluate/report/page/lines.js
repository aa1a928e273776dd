// Accuracy by class (predictions.npz), and top-1 with translated content (translation.csv).
const SHOWN_CLASSES = 30;
let classFigure = null, classesDrawn = [], translationFigure = null;

// The line of a curve at a size, found by the policy of the curve's row there.
function lineOf(lines, curve, protocol, size) {
  const row = rowsOf(curve, protocol).find((one) => one.img_size === size);
  return row && lines.find((line) => line.label === row.label && line.policy === row.policy && line.protocol === protocol && line.img_size === size);
}

// Rows with n null have the same images by class as the row before.
function classLines() {
  DATA.classes.rows.forEach((row, i) => (row.n ??= DATA.classes.rows[i - 1].n));
  return DATA.classes.rows;
}

function classChange() {
  const curve = Number($("class-curve").value), protocol = $("class-protocol").value;
  const home = DATA.curves[curve].rows.map((at) => DATA.rows[at].train_size)[0]; // the training size
  const lines = classLines(), before = lineOf(lines, curve, protocol, home), after = lineOf(lines, curve, protocol, $("class-size").value);
  if (!before || !after) return { home, changes: [] };
  const share = (line, at) => (line.n[at] ? (100 * line.hits[at]) / line.n[at] : null);
  const changes = DATA.classes.names.map((name, at) => ({ name, before: share(before, at), after: share(after, at), n: after.n[at] })).filter((one) => one.before !== null && one.after !== null);
  for (const one of changes) one.change = one.after - one.before;
  return { home, changes: changes.sort((a, b) => a.change - b.change) };
}

function drawClasses() {
  const { home, changes: all } = classChange(), size = $("class-size").value, half = SHOWN_CLASSES / 2;
  const changes = all.filter((one) => one.change !== 0);
  const shown = changes.length > SHOWN_CLASSES ? [...changes.slice(0, half), ...changes.slice(-half)] : changes;
  classesDrawn = all;
  classFigure.title(`Change of top-1 from ${home} to ${size} px: ${DATA.curves[$("class-curve").value].name}, ${$("class-protocol").value} protocol, ${DATA.data}`);
  const trace = {
    type: "bar", orientation: "h", y: shown.map((one, i) => i), x: shown.map((one) => one.change), hoverinfo: "text", textposition: "none",
    hovertext: shown.map((one) => `<b>${plain(word(one.name))}</b>${word(one.name) === one.name ? "" : ` (${plain(one.name)})`}<br>${number(one.before)} % at ${home}<br>${number(one.after)} % at ${size}<br>n = ${number(one.n)}, all seeds`),
    marker: { color: shown.map((one) => (one.change < 0 ? "#D55E00" : "#0072B2")) },
  };
  const cut = changes.length > SHOWN_CLASSES ? ` Shown are the ${half} that lose most and the ${half} that gain most, of ${changes.length}; the CSV has all.` : "";
  const lose = changes.filter((one) => one.change < 0).length;
  $("class-note").textContent = all.length ? `${lose} of ${all.length} classes lose, ${changes.length - lose} gain, ${all.length - changes.length} stay the same.${cut}` : "There are no counts for this choice.";
  classFigure.whole.hidden = !changes.length;
  if (!changes.length) return;
  const short = (name) => plain(name.length > 22 ? `${name.slice(0, 21)}…` : name);
  draw(classFigure.plot, [trace], layout({
    height: 90 + Math.max(2, shown.length) * 20, margin: { l: Math.min(150, 24 + 7 * Math.max(4, ...shown.map((one) => Math.min(22, word(one.name).length)))), r: 12, t: 8, b: 46 },
    xaxis: { title: { text: "change of top-1 (percentage points)" }, zeroline: true, zerolinecolor: colours().ink },
    yaxis: { tickvals: shown.map((one, i) => i), ticktext: shown.map((one) => short(word(one.name))), autorange: "reversed", showgrid: false },
  }));
}

function startClasses() {
  classFigure = figure($("class-figure"), "class-plot", () => [["class", "n", "top1_at_training_size", "top1", "change"], ...classesDrawn.map((one) => [one.name, one.n, one.before, one.after, one.change])]);
  options($("class-curve"), DATA.curves.map((curve, at) => [at, curve.name]));
  options($("class-protocol"), DATA.protocols.map((name) => [name, name]));
  options($("class-size"), DATA.sizes.map(({ name }) => [name, name]), [...DATA.sizes].reverse().find(({ name }) => !trainSizes.includes(name))?.name);
  for (const id of ["class-curve", "class-protocol", "class-size"]) $(id).addEventListener("change", drawClasses);
  redraws.push(drawClasses);
}

function drawTranslation() {
  const [size, protocol] = JSON.parse($("translation-at").value), metric = { key: "top1", name: "top-1 (%)" };
  const traces = [...chosen].flatMap(([at, place]) => {
    const row = rowsOf(at, protocol).find((one) => one.img_size === size), look = style(place), name = DATA.curves[at].name;
    const own = row ? DATA.translation.filter((line) => line.label === row.label && line.policy === row.policy && line.img_size === size && line.protocol === protocol).sort((a, b) => a.translation - b.translation) : [];
    return own.length ? [{
      type: "scatter", mode: "lines+markers", name, x: own.map((line) => line.translation), y: own.map((line) => line.top1), hoverinfo: "text", meta: { curve: at, lines: own },
      hovertext: own.map((line) => `<b>${plain(name)}</b><br>${line.translation} px: ${metric.name} ${number(line.top1)}<br>95 %: ${number(line.low)} to ${number(line.high)}<br>n = ${number(line.n)}, ${line.seeds} seed${line.seeds > 1 ? "s" : ""}`),
      line: { color: look.colour, dash: look.dash, width: 1.8 }, marker: { symbol: look.symbol, size: 8, color: look.colour },
      error_y: { type: "data", symmetric: false, thickness: 1, width: 2, color: look.colour, array: own.map((line) => line.high - line.top1), arrayminus: own.map((line) => line.top1 - line.low) },
    }] : [];
  });
  translationFigure.title(`Top-1 (%) with the content translated, ${size} px, ${protocol} protocol, ${DATA.data}`);
  draw(translationFigure.plot, traces, layout({ height: 360, xaxis: { title: { text: "translated down and right (px)" } }, yaxis: { title: { text: metric.name } } }));
}

function translationCsv() {
  const lines = translationFigure.plot.data.flatMap((trace) => trace.meta.lines);
  const keys = ["label", "policy", "protocol", "img_size", "translation", "top1", "low", "high", "n", "seeds"];
  return [keys, ...lines.map((line) => keys.map((key) => line[key]))];
}

function startTranslation() {
  translationFigure = figure($("translation-figure"), "translation-plot", translationCsv);
  const places = [...new Set(DATA.translation.map((line) => JSON.stringify([line.img_size, line.protocol])))];
  options($("translation-at"), places.map((place) => [place, JSON.parse(place).join(", ")]));
  $("translation-at").addEventListener("change", drawTranslation);
  followers.push(drawTranslation);
}
