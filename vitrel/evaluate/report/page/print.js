// Printing: light colours, the width of the sheet, all details unfolded.
const PAPER = 700; // pixels between the margins of A4
let beforePaper = null;

function toPaper() {
  const root = document.documentElement;
  if (beforePaper) return;
  beforePaper = { theme: root.dataset.theme, folded: [...document.querySelectorAll("main details:not([open])")] };
  root.dataset.theme = "light";
  document.querySelector("main").style.width = `${PAPER}px`;
  for (const details of beforePaper.folded) details.open = true;
  for (const redraw of redraws) redraw();
}

function fromPaper() {
  if (!beforePaper) return;
  document.documentElement.dataset.theme = beforePaper.theme;
  document.querySelector("main").style.width = "";
  for (const details of beforePaper.folded) details.open = false;
  beforePaper = null;
  for (const redraw of redraws) redraw();
}

addEventListener("beforeprint", toPaper);
addEventListener("afterprint", fromPaper);
