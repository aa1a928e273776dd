// What the protocols mean, and one image as the model saw it at every size and protocol.
const PROTOCOLS = {
  scale: "the same field of view at every size: the image is resized, so objects grow with it.",
  canvas: "objects keep their size in pixels: a larger image shows more of the scene, or padding around it.",
  native: "every image keeps its own aspect ratio and is resized to a budget of tokens, with nothing cropped.",
};
const SEEN_SIDE = 150; // pixels that the longest side is drawn with

function startProtocols() {
  const told = [...new Set(DATA.protocols.map((name) => name.split(",")[0]))];
  $("protocol-list").replaceChildren(...told.flatMap((name) => [make("dt", { textContent: name }), make("dd", { textContent: PROTOCOLS[name] || "" })]));
  const seen = PICTURES ? PICTURES.seen : [];
  $("seen-title").hidden = $("seen-region").hidden = $("seen-note").hidden = !seen.length;
  if (!seen.length) return;
  const sizes = bySize(seen.map((item) => item.size)), rows = [...new Set(seen.map((item) => item.protocol))];
  const most = Math.max(...seen.flatMap((item) => item.shape)), first = seen[0];
  const picture = (item) => {
    const [height, width] = item.shape.map((n) => Math.max(16, Math.round((n / most) * SEEN_SIDE)));
    const alt = `${word(item.class)} at ${item.size}, ${item.protocol} protocol, as ${item.label} saw it`;
    return make("img", { src: PICTURES.blobs[item.picture], width, height, alt });
  };
  const lines = rows.map((protocol) => make("tr", {}, make("th", { scope: "row", textContent: protocol }), ...sizes.map((size) => {
    const item = seen.find((one) => one.size === size && one.protocol === protocol);
    return make("td", {}, ...(item ? [picture(item)] : ["–"]));
  })));
  $("seen-title").textContent = `One image (${word(first.class)}) as ${first.label} saw it, ${DATA.data}`;
  $("seen").replaceChildren(heads(["", ...sizes.map((size) => `${size} px`)]), make("tbody", {}, ...lines));
  $("seen-note").textContent = "Drawn in proportion to the image size. Models with another training size or crop see it resized accordingly.";
}
