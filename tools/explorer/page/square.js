// The definitions of the 2 × 2 grid: four patches, two numbers each, with no, absolute and relative position.
const CORNERS = ["top left", "top right", "bottom left", "bottom right"];
const CASES = { none: "no position", absolute: "absolute", relative: "relative" };

const bySign = ([dy, dx]) => (state.sign === "query" ? [dy, dx] : [0 - dy, 0 - dx]); // offsets are query − key everywhere else
const squareOffset = (query, key) => bySign(offsetOf(query, key, 2));
const biasOf = ([dy, dx]) => state.biases[3 * (dy + 1) + dx + 1];

const contents = () => split(state.contents, 2);
const placed = () => contents().map((x, patch) => x.map((value, at) => value + split(state.positions, 2)[patch][at]));

// For each case the rows of the four queries.
function squareRows() {
  const x = contents(), xp = placed(), keys = [0, 1, 2, 3], nothing = [0, 0, 0, 0];
  return {
    none: x.map((query) => attentionRow(query, x, x, nothing)),
    absolute: xp.map((query) => attentionRow(query, xp, xp, nothing)),
    relative: x.map((query, i) => attentionRow(query, x, x, keys.map((key) => biasOf(squareOffset(i, key))))),
  };
}

// The other pairs of query and key with the same offset, which share one bias.
const sharing = (query, key) => tokens(16, (at) => [Math.floor(at / 4), at % 4])
  .filter(([i, j]) => i !== query && String(offsetOf(i, j, 2)) === String(offsetOf(query, key, 2)));

// The keys with the largest logit: several where they are alike.
const targets = (logits) => [0, 1, 2, 3].filter((key) => logits[key] > Math.max(...logits) - 1e-9);

// Where the key lies from the query, in words and as an arrow.
function side(query, key) {
  const [up, left] = offsetOf(query, key, 2);
  const words = [up > 0 ? "above" : up < 0 ? "below" : "", left > 0 ? "to the left" : left < 0 ? "to the right" : ""].filter(Boolean);
  return words.join(" and ") || "itself";
}
const arrow = ([up, left]) => ["↘↓↙", "→•←", "↗↑↖"][up + 1][left + 1]; // of an offset query − key

const only = (dy, dx, value) => tokens(9, (at) => (at === 3 * (dy + 1) + dx + 1 ? value : 0));
const BLANK = [0, 0, 0, 0, 0, 0, 0, 0];
const headPreset = (biases, neighbor, storyQuery, storyKey) => [
  { contents: BLANK, biases, sign: "key", storyQuery, storyKey },
  `All contents are 0, so that the bias alone decides: a patch with a neighbor ${neighbor} looks at it, one without sees all four alike. Change a content, and it competes with the bias. Change the sign of the offset, and the head looks the other way.`,
];
const PRESETS = {
  "The example": [
    { contents: DEFAULTS.contents, biases: DEFAULTS.biases, sign: "query", storyQuery: 0, storyKey: 2 },
    "The same four patches three times. Without position only contents count; absolute position adds a vector p to each patch; relative position leaves the contents alone and adds a bias for each offset.",
  ],
  "Head 1: right": headPreset(only(0, 1, 0.2), "to the right", 0, 1),
  "Head 2: left": headPreset(only(0, -1, 0.2), "to the left", 1, 0),
  "Head 3: below": headPreset(only(1, 0, 0.3), "below", 0, 2),
  "Head 4: below right": headPreset(only(1, 1, 0.3), "below and to the right", 0, 3),
  "Content against bias": [
    { contents: [1, 0, 3, 0, 0, 1, 0, 0], biases: only(0, 1, -1), sign: "key", storyQuery: 0, storyKey: 1 },
    "The bias takes 1 from every key to the right of its query. Patch 0 looks to the right all the same, because its content and that of patch 1 match so well: 2.1213 − 1 = 1.1213 is still the largest logit of its row. Patch 2 has no such match to its right and looks at itself.",
  ],
};
