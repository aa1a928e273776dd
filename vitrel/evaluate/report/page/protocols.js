// Descriptions of the protocols, and one image as preprocessed for every size and protocol.
const PROTOCOLS = {
  scale: "every size has the same field of view: the image is resized, and objects grow with it.",
  canvas: "objects keep their size in pixels: a larger image shows more of the scene, or padding around it.",
  native: "every image keeps its own aspect ratio and is resized to a maximum number of tokens, without cropping.",
};
const SEEN_SIDE = 150; // longest side of the drawn images, in CSS pixels

function startProtocols() {
  const names = [...new Set(DATA.protocols.map((name) => name.split(",")[0]))];
  $("protocol-list").replaceChildren(...names.flatMap((name) => [make("dt", { textContent: name }), make("dd", { textContent: PROTOCOLS[name] || "" })]));
  const seen = PICTURES ? PICTURES.seen : [];
  $("seen-title").hidden = $("seen-region").hidden = $("seen-note").hidden = !seen.length;
  if (!seen.length) return;
  const sizes = bySize(seen.map((item) => item.size)), rows = [...new Set(seen.map((item) => item.protocol))];
  const most = Math.max(...seen.flatMap((item) => item.shape)), first = seen[0];
  const picture = (item) => {
    const [height, width] = item.shape.map((n) => Math.max(16, Math.round((n / most) * SEEN_SIDE)));
    const alt = `${word(item.class)} at ${item.size}, ${item.protocol} protocol, as the input of ${item.label}`;
    return make("img", { src: PICTURES.blobs[item.picture], width, height, alt });
  };
  const lines = rows.map((protocol) => make("tr", {}, make("th", { scope: "row", textContent: protocol }), ...sizes.map((size) => {
    const item = seen.find((one) => one.size === size && one.protocol === protocol);
    return make("td", {}, ...(item ? [picture(item)] : ["–"]));
  })));
  $("seen-title").textContent = `One image (${word(first.class)}) as the input of ${first.label}, ${DATA.data}`;
  $("seen").replaceChildren(heads(["", ...sizes.map((size) => `${size} px`)]), make("tbody", {}, ...lines));
  $("seen-note").textContent = "Images are drawn in proportion to their size. For models with another training size or crop they are resized accordingly.";
}
