// A grid of cells that is walked with the arrow keys (one of them in the tab order), tapped or pointed at.
// draw({rows, columns, size, cell, picked, heads, block, square}): cell(i, j) gives {text, label, background, ink} and mark for a
// star; heads holds the texts {corner, rows, columns}; block [h, w] draws a heavier line before every such row and column.
function cellGrid(host, label, { pick, point = () => {} }) {
  const grid = make("div", { class: "cells", role: "grid", "aria-label": label });
  host.replaceChildren(grid);
  let shape = "", cells = [], drawn = null, pointed = "";
  const placeOf = (event) => {
    const cell = event.target.closest("[role=gridcell]");
    return cell && cell.dataset.at.split(",").map(Number);
  };

  function build({ rows, columns, heads, block }) {
    const header = (role, text) => make("div", { role }, text);
    cells = tokens(rows, (i) => tokens(columns, (j) => {
      const edges = block ? [j && j % block[1] === 0 && "across", i && i % block[0] === 0 && "down"].filter(Boolean) : [];
      return make("div", { role: "gridcell", "data-at": `${i},${j}`, class: edges.join(" ") });
    }));
    const lines = cells.map((line, i) => make("div", { role: "row" }, ...(heads ? [header("rowheader", heads.rows[i])] : []), ...line));
    const corner = () => make("div", { class: "corner", role: "presentation" }, heads.corner);
    if (heads) lines.unshift(make("div", { role: "row" }, corner(), ...heads.columns.map((text) => header("columnheader", text))));
    grid.replaceChildren(...lines);
  }

  function draw(how) {
    const now = JSON.stringify([how.rows, how.columns, how.heads, how.block]);
    if (now !== shape) build(how);
    [shape, drawn] = [now, how];
    const head = how.heads ? "42px " : "";
    grid.style.gridTemplateColumns = `${head}repeat(${how.columns}, ${how.size}px)`;
    grid.style.gridTemplateRows = `${how.heads ? "28px " : ""}repeat(${how.rows}, ${how.high || how.size}px)`;
    cells.forEach((line, i) => line.forEach((element, j) => {
      const { text, label: says, background, ink, mark } = how.cell(i, j), here = i === how.picked[0] && j === how.picked[1];
      element.textContent = text;
      element.ariaLabel = says;
      element.classList.toggle("star", Boolean(mark));
      element.tabIndex = here ? 0 : -1;
      element.ariaSelected = String(here);
      Object.assign(element.style, { background, color: ink, fontSize: `${how.font || 13}px` });
    }));
  }

  grid.addEventListener("click", (event) => {
    const at = placeOf(event);
    if (!at) return;
    pick(...at);
    cells[at[0]][at[1]].focus();
  });
  grid.addEventListener("keydown", (event) => {
    const at = placeOf(event), { rows, columns } = drawn;
    if (!at || event.altKey || event.metaKey || event.ctrlKey) return;
    const [i, j] = at;
    const next = { ArrowUp: [i - 1, j], ArrowDown: [i + 1, j], ArrowLeft: [i, j - 1], ArrowRight: [i, j + 1], Home: [i, 0], End: [i, columns - 1] }[event.key];
    if (!next) return;
    event.preventDefault();
    const [y, x] = [Math.min(Math.max(next[0], 0), rows - 1), Math.min(Math.max(next[1], 0), columns - 1)];
    pointed = "";
    pick(y, x);
    cells[y][x].focus();
  });
  const pointAt = (at) => {
    if (String(at) !== pointed) point(at);
    pointed = String(at);
  };
  // pointerover also comes from a pointer at rest, when the arrow keys scroll the page beneath it
  grid.addEventListener("pointermove", (event) => pointAt(placeOf(event)));
  grid.addEventListener("pointerleave", () => pointAt(null));
  return { draw, all: () => cells };
}

// The side of a cell in pixels so that `columns` of them fill the room of `host`.
function cellSize(host, columns, least, most, heads = false) {
  const room = host.closest(".scroll, .figure").clientWidth - 8 - (heads ? 42 : 0);
  return Math.min(most, Math.max(least, Math.floor(room / columns)));
}
