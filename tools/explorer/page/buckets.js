// T5's buckets: along one axis as steps over a strip, on a grid as the product of both axes.
let latticeGrid = null, lattice = [0, -1]; // the offset chosen on the grid

const reach = () => state.span || Math.max(4, Math.ceil(state.max * 1.1) + 1);

function runs(rule, far) {
  const found = [];
  for (let offset = -far; offset <= far; offset += 1) {
    const bucket = t5Bucket(rule, offset), last = found[found.length - 1];
    if (last && last.bucket === bucket) last.to = offset;
    else found.push({ bucket, from: offset, to: offset, within: t5Within(rule, t5Distance(rule, offset)) });
  }
  return found;
}

function ticks(far) {
  const step = [1, 2, 5, 10, 20, 50, 100].find((one) => far / one <= ($("strip").clientWidth < 600 ? 3.5 : 7)) || 100;
  return tokens(2 * Math.floor(far / step) + 1, (at) => (at - Math.floor(far / step)) * step);
}

function drawStrip(rule, offset = state.offset) {
  const far = reach(), wide = $("strip").clientWidth, top = 34, tall = 120, base = top + tall, each = wide / (2 * far + 1);
  const x = (at) => (at + far + 0.5) * each; // the left edge of offset `at` is x(at - 0.5)
  const parts = runs(rule, far).map(({ bucket, from, to, within }, at) => {
    const left = x(from - 0.5), room = x(to + 0.5) - left, high = ((within + 1) / rule.count) * tall, kind = within < rule.exact ? "exact" : "log";
    const steps = `<rect class="${kind} ${at % 2 ? "odd" : ""}" data-bucket="${bucket}" data-from="${from}" data-to="${to}" x="${left}" y="${base - high}" width="${room}" height="${high}"/>`;
    const text = room > 8 * String(bucket).length + 2 ? `<text x="${left + room / 2}" y="${base + 17}" text-anchor="middle">${bucket}</text>` : "";
    return `${steps}<rect class="band ${at % 2 ? "odd" : ""}" x="${left}" y="${base}" width="${room}" height="24"/>${text}`;
  });
  const edge = (at, right) => `<line class="edge" data-edge="${at}" x1="${x(at)}" x2="${x(at)}" y1="${top - 12}" y2="${base + 24}"/>${wide > 600 || right ? `<text class="soft" x="${x(at) + (right ? 5 : -5)}" y="${top - 4}" text-anchor="${right ? "start" : "end"}">${right ? "logarithmic →" : "← logarithmic"}</text>` : ""}`;
  const edges = rule.exact && rule.exact <= far ? [edge(rule.exact - 0.5, true), ...(rule.both ? [edge(0.5 - rule.exact, false)] : [])] : [];
  const axis = ticks(far).map((at) => `<line class="line" x1="${x(at)}" x2="${x(at)}" y1="${base + 24}" y2="${base + 29}"/><text x="${x(at)}" y="${base + 42}" text-anchor="middle">${signed(at)}</text>`);
  const ends = `<text class="soft" x="0" y="12">key right or below</text><text class="soft" x="${wide}" y="12" text-anchor="end">key left or above</text>`;
  const width = Math.max(each, 3), here = `<rect class="here" x="${x(offset) - width / 2}" y="${top}" width="${width}" height="${tall + 24}"/>`;
  const label = `Bucket of every offset from ${signed(-far)} to ${signed(far)}; one bucket per distance below ${rule.exact}, logarithmic from there`;
  $("strip").innerHTML = `<svg role="img" aria-label="${label}" width="${wide}" height="${base + 60}" viewBox="0 0 ${wide} ${base + 60}">${parts.join("")}${edges.join("")}${axis.join("")}${ends}<text class="soft" x="${wide / 2}" y="${base + 57}" text-anchor="middle">offset, query − key, in patches</text>${here}</svg>`;
  say($("why"), why(rule, offset));
}

// The distances of bucket `within` of one sign in words.
function holds(rule, within) {
  const from = rule.first[within], to = rule.first[within + 1] - 1;
  if (within === rule.count - 1) return `${from} and more`;
  if (to < from) return "none";
  return to > from ? `${from} to ${to}` : String(from);
}

function why(rule, offset) {
  const distance = t5Distance(rule, offset), within = t5Within(rule, distance), { exact, logs, count, max } = rule;
  const after = offset < 0 ? `${Math.abs(offset)} to the right or below` : `${offset} to the left or above`;
  const start = `Offset ${signed(offset)}: the key is ${offset ? after : "in the query's own row or column"}.`;
  if (!rule.both && offset < 0) return `${start} With one sign only, it counts as distance 0: bucket ${within}.`;
  const sign = offset < 0 ? ` The offset is negative, which adds ${count}: bucket ${within + count}.` : "";
  if (count === 1) return `${start} One bucket per sign holds every distance: bucket 0.${sign}`;
  if (distance < exact) return `${start} Distance ${distance} is below ${exact}, so it has a bucket of its own: bucket ${within}.${sign}`;
  if (max === exact) return `${start} The maximum distance is ${max}, where the logarithmic part begins, so all from there share the last bucket: ${within}.${sign}`;
  const value = (Math.log(distance / exact) / Math.log(max / exact)) * logs;
  // as many digits as it takes to round down to what the integers say
  const digits = [4, 6, 8].find((n) => Math.floor(Number(value.toFixed(n))) === within - exact) || 4;
  const formula = `${exact} + ⌊ln(${distance}/${exact}) / ln(${max}/${exact}) · ${logs}⌋ = ${exact} + ⌊${fixed(value, digits)}⌋`;
  if (distance >= max) return `${start} Distance ${distance} is not below ${exact}: ${formula}, but no more than the last bucket, ${within}, which holds ${holds(rule, within)}.${sign}`;
  return `${start} Distance ${distance} is not below ${exact}: ${formula} = ${within}. Bucket ${within} holds ${holds(rule, within)}.${sign}`;
}

function drawList(rule) {
  const used = (within) => (holds(rule, within) === "none" ? "no distance" : holds(rule, within));
  const heads = rule.both ? ["distance", "offset ≥ 0", "offset < 0", "part"] : ["distance", "offset ≥ 0", "part"];
  const negative = (within) => (within + 1 === rule.count || rule.first[within + 1] > 1 ? String(within + rule.count) : "unused");
  const lines = rule.first.map((_, within) => [
    used(within), String(within), ...(rule.both ? [negative(within)] : []), within < rule.exact ? "exact" : "logarithmic",
  ]);
  table($("list"), heads, lines, null, t5Within(rule, t5Distance(rule, state.offset)));
}

function showPair(rule, [dy, dx]) {
  const [by, bx] = [t5Bucket(rule, dy), t5Bucket(rule, dx)], n = state.buckets, same = t5Pair(rule, [dy, dx]);
  say($("pair"), `Offset (${signed(dy)}, ${signed(dx)}): bucket ${by} along the rows, ${bx} along the columns, together ${by} · ${n} + ${bx} = ${same}.`);
  latticeGrid.all().forEach((line, i) => line.forEach((cell, j) => cell.classList.toggle("alike", t5Pair(rule, latticeOffset(i, j)) === same)));
}

const latticeOffset = (i, j) => [i - state.rows + 1, j - state.columns + 1];
const t5Pair = (rule, [dy, dx]) => t5Bucket(rule, dy) * state.buckets + t5Bucket(rule, dx);

function drawLattice(rule) {
  const { rows: h, columns: w } = state, wide = 2 * w - 1, size = cellSize($("lattice-cells"), wide, 27, 46, true);
  lattice = [[lattice[0], h], [lattice[1], w]].map(([at, n]) => Math.min(n - 1, Math.max(1 - n, at)));
  const heads = { corner: "Δy ↓\nΔx →", rows: tokens(2 * h - 1, (i) => signed(i - h + 1)), columns: tokens(wide, (j) => signed(j - w + 1)) };
  latticeGrid.draw({
    rows: 2 * h - 1, columns: wide, size, high: Math.min(size, 34), heads, font: size < 34 ? 10 : 12, picked: [lattice[0] + h - 1, lattice[1] + w - 1],
    cell: (i, j) => {
      const at = latticeOffset(i, j), pair = t5Pair(rule, at), within = at.map((one) => t5Within(rule, t5Distance(rule, one)));
      const side = within.some((one) => one >= rule.exact) ? "up" : "down", { background, ink } = color(side, (within[0] + within[1]) % 2 ? 0.12 : 0.3);
      return { text: pair, label: `offset (${at.map(signed).join(", ")}): bucket ${pair}`, background, ink };
    },
  });
  showPair(rule, lattice);
}

function drawBuckets() {
  const rule = t5Rule(state);
  drawStrip(rule);
  drawList(rule);
  drawLattice(rule);
}

function startBuckets() {
  const offsetAt = (event) => {
    const box = $("strip").getBoundingClientRect(), far = reach();
    return Math.min(far, Math.max(-far, Math.floor(((event.clientX - box.left) / box.width) * (2 * far + 1)) - far));
  };
  $("strip").addEventListener("pointermove", (event) => drawStrip(t5Rule(state), offsetAt(event)));
  $("strip").addEventListener("pointerleave", () => drawStrip(t5Rule(state)));
  $("strip").addEventListener("click", (event) => change({ offset: offsetAt(event) }));
  latticeGrid = cellGrid($("lattice-cells"), "Bucket of every offset of the grid", {
    pick: (i, j) => {
      lattice = latticeOffset(i, j);
      drawLattice(t5Rule(state));
    },
    point: (at) => showPair(t5Rule(state), at ? latticeOffset(...at) : lattice),
  });
}
