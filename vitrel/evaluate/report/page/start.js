// Puts the page together.
function lead() {
  const labels = [...new Set(DATA.rows.map((row) => row.label))], counts = DATA.rows.map((row) => row.seeds);
  const fewest = Math.min(...counts), seeds = Math.max(...counts);
  const many = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
  const about = Object.fromEntries(DATA.common.map(([key, , value]) => [key, value]));
  const where = [about.device, about.dtype].filter(Boolean).join(", "), named = labels.length > 4 ? many(labels.length, "model") : labels.join(", ");
  const images = Math.max(...DATA.rows.map((row) => row.n));
  $("lead").textContent = `${named} on ${DATA.data} (${many(number(images), "image")}): ${fewest < seeds ? `${fewest} to ` : ""}${many(seeds, "seed")}, trained at ${trainSizes.join(", ")}, evaluated at ${many(DATA.sizes.length, "size")} in the ${DATA.protocols.join(" and ")} protocol${DATA.protocols.length > 1 ? "s" : ""}${where ? `; ${where}` : ""}.`;
}

function theme() {
  const asked = $("theme").value;
  const name = asked || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  if (document.documentElement.dataset.theme === name) return;
  document.documentElement.dataset.theme = name;
  for (const redraw of redraws) redraw();
  if (redraws.length) legend();
}

function contentsList() {
  const links = [...document.querySelectorAll("main section:not([hidden])")].map((section) => make("li", {}, make("a", { href: `#${section.id}`, textContent: section.querySelector("h2").textContent })));
  $("sections").replaceChildren(...links);
}

function startClaims() {
  $("claim-list").replaceChildren(...DATA.claims.map(({ claim, verdict }) => make("li", {}, make("strong", { textContent: claim }), ` ${verdict}`)));
  if (!DATA.claims.length) hide("claims");
}

function leftOut() {
  const missing = [];
  if (PICTURES) missing.push(...PICTURES.models.flatMap((model) => [...(model.error ? [`maps of ${model.label}: ${model.error}`] : []), ...model.left_out]));
  else missing.push("maps of position and attention: this folder has no pictures.json.gz");
  if (!DATA.predicted.length) missing.push("mistakes, predictions that change with size, accuracy by class: this folder has no predictions.npz");
  if (!DATA.translation.length) missing.push("translated content: this folder has no translation.csv");
  $("left-out").replaceChildren(...missing.map((text) => make("li", { textContent: text })));
  $("left-out-part").hidden = !missing.length;
}

async function startPage() {
  theme();
  $("theme").addEventListener("change", theme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
  PICTURES = await readPictures();
  lead();
  startAdvice();
  startProtocols();
  startClaims();
  startCurves();
  startThroughput();
  startMistakes();
  startRows();
  if (DATA.classes) startClasses();
  else hide("classes");
  if (DATA.translation.length) startTranslation();
  else hide("translation");
  for (const start of [startLattices, startSimilarity, startAttention]) if (PICTURES) start();
  if (!PICTURES) ["lattices", "similarity", "attention"].forEach(hide);
  leftOut();
  contentsList();
  if (DATA.classes) drawClasses();
  drawCurves();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    for (const redraw of redraws) redraw();
  });
  hide("drawing");
  document.documentElement.dataset.ready = "yes";
}

startPage();
