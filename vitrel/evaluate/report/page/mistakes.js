// Most frequent confusions of classes, and images whose prediction changes with size, for one curve and protocol.
const className = (at) => (at < 0 ? "a class not in the data" : DATA.predicted[at]);

function drawMistakes() {
  const curve = DATA.curves[$("mistake-curve").value], protocol = $("mistake-protocol").value;
  drawConfusions(Number($("mistake-curve").value), protocol, DATA.confusions.find((one) => one.label === curve.label && one.protocol === protocol));
  drawChanged(DATA.changed.find((one) => one.label === curve.label && one.policy === curve.policy && one.protocol === protocol), curve, protocol);
}

function drawConfusions(at, protocol, found) {
  const lines = found ? found.rows.map((row) => ({ ...row, label: found.label, protocol })) : [];
  const own = DATA.sizes.map(({ name }) => lineOf(lines, at, protocol, name)).filter(Boolean);
  const name = DATA.curves[at].name;
  $("confusions-title").textContent = own.length ? `Most frequent confusions of classes: ${name}, ${protocol} protocol, ${DATA.data}` : `${name} makes no mistakes in the ${protocol} protocol.`;
  $("confusions").closest(".scroll").hidden = !own.length;
  if (!own.length) return;
  const percent = (count, of) => (of ? ` (${((100 * count) / of).toFixed(0)} %)` : "");
  const body = found.pairs.map(([label, predicted], i) => make("tr", {}, make("td", {}, classText(className(label))), make("td", {}, classText(className(predicted))),
    ...own.map((row) => make("td", { class: "number", textContent: row.counts[i] ? `${row.counts[i]}${percent(row.counts[i], found.of[i])}` : "–" }))));
  const all = make("tr", {}, make("th", { scope: "row", colSpan: 2, textContent: "all mistakes" }), ...own.map((row) => make("td", { class: "number", textContent: `${number(row.wrong)}${percent(row.wrong, row.n)}` })));
  $("confusions").replaceChildren(heads(["class", "predicted", ...own.map((row) => `${row.img_size} px`)], 2), make("tbody", {}, ...body, all));
}

function drawChanged(found, curve, protocol) {
  const some = found && found.images.length;
  $("changed-title").textContent = some ? `Images whose prediction changes with size: ${curve.name}, ${protocol} protocol, ${DATA.data}` : found ? `${curve.name} predicts the same for every image at all sizes of the ${protocol} protocol.` : "";
  $("changed").closest(".scroll").hidden = !some;
  $("changed-note").textContent = "";
  if (!some) return;
  const thumbnails = PICTURES ? PICTURES.thumbnails : {}, pictured = found.images.some(({ image }) => thumbnails[DATA.images[image][0]]);
  const body = found.images.map(({ image, predicted }) => {
    const [name, label] = DATA.images[image], source = thumbnails[name];
    const cells = predicted.map((one) => make("td", {}, one === label ? "✓ " : "✗ ", classText(className(one), one === label ? "" : "wrong")));
    const picture = pictured ? [make("td", {}, ...(source ? [make("img", { src: source, alt: `${name}, ${word(className(label))}` })] : []))] : [];
    return make("tr", {}, ...picture, make("td", { textContent: name.replace(/^.*\//, ""), title: name }), make("td", {}, classText(className(label))), ...cells);
  });
  $("changed").replaceChildren(heads([...(pictured ? ["image"] : []), "name", "class", ...found.sizes.map((size) => `${size} px`)]), make("tbody", {}, ...body));
  const share = ((100 * found.changed) / found.of).toFixed(1), shown = found.images.length;
  $("changed-note").textContent = `${number(found.changed)} of ${number(found.of)} images (${share} %) change${shown < found.changed ? `; shown are ${shown}, first those that are right at the training size and wrong at most others` : ""}. ✓: right, ✗: wrong.`;
}

function startMistakes() {
  if (!DATA.confusions.length && !DATA.changed.some((one) => one.images.length)) return hide("mistakes");
  options($("mistake-curve"), DATA.curves.map((curve, at) => [at, curve.name]));
  options($("mistake-protocol"), DATA.protocols.map((name) => [name, name]));
  for (const id of ["mistake-curve", "mistake-protocol"]) $(id).addEventListener("change", drawMistakes);
  drawMistakes();
}
