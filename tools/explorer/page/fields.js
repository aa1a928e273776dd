// Fields for numbers that the reader may change: one for each entry of a list in the state.
function numberField(list, at, label = "") {
  const field = make("input", { type: "number", step: "0.1", "data-list": list, "data-at": at, "aria-label": label });
  field.addEventListener("input", () => { // a field that is empty or half written changes nothing
    if (Number.isFinite(field.valueAsNumber)) change({ [list]: state[list].map((value, i) => (i === at ? field.valueAsNumber : value)) });
  });
  field.addEventListener("blur", drawFields);
  return field;
}

// Leaves what is being written as it is while it means the same number.
function drawFields() {
  for (const field of document.querySelectorAll("[data-list]")) {
    const value = state[field.dataset.list][field.dataset.at];
    if (field.valueAsNumber !== value) field.value = value;
  }
}
