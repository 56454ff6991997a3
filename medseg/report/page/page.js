"use strict";
// Sort a table by a column: numbers as numbers, empty cells last.
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending" ? 1 : -1;
    for (const other of heads) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", up > 0 ? "ascending" : "descending");
    const text = (cell) => cell.dataset.order ?? cell.textContent;
    const rows = [...table.tBodies[0].rows].map((row) => [row, text(row.cells[column])]);
    rows.sort(([, a], [, b]) => (a === "") - (b === "") || up * (a - b || a.localeCompare(b, "en", { numeric: true }) || 0));
    table.tBodies[0].append(...rows.map(([row]) => row));
  }));
}

// Charts: colours are variables of the style sheet, so that they follow its light and dark scheme.
const theme = {
  background: "transparent", font: getComputedStyle(document.body).fontFamily, view: { stroke: null },
  axis: {
    labelColor: "var(--quiet)", titleColor: "var(--quiet)", domainColor: "var(--quiet)", tickColor: "var(--quiet)", gridColor: "var(--rule)",
    labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal", titlePadding: 8,
  },
  axisX: { grid: false },
};
const specs = JSON.parse(document.getElementById("specs")?.textContent ?? "[]");
const views = Promise.all([...document.querySelectorAll(".chart")].map(async (place) => {
  const spec = specs[place.dataset.spec];
  const options = { actions: false, renderer: "svg", config: theme, ast: true, defaultStyle: false, tooltip: { disableDefaultStyle: true } };
  return (await vegaEmbed(place, spec, options)).view;
}));
const setSignal = async (name, value) => {
  for (const view of await views) view.signal(name, value).runAsync();
};

// Bring one setting to the front in all charts and tables: under the pointer, or kept by a click on the legend.
let kept = null;
const show = (setting) => {
  for (const one of document.querySelectorAll("tbody tr")) one.classList.toggle("lit", setting !== null && one.dataset.setting === setting);
  setSignal("lit", setting === null ? null : Number(setting));
};
for (const one of document.querySelectorAll(".legend button, tbody tr[data-setting]")) {
  one.addEventListener("pointerenter", () => show(one.dataset.setting));
  one.addEventListener("pointerleave", () => show(kept));
}
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    kept = kept === button.dataset.setting ? null : button.dataset.setting;
    for (const other of document.querySelectorAll(".legend button")) other.setAttribute("aria-pressed", String(other.dataset.setting === kept));
    show(kept);
  });
}

// Filters: rows by their data, pictures by the cases of the rows that are left, charts by the numbers of these rows.
for (const form of document.querySelectorAll(".filters")) {
  const rows = [...document.querySelectorAll("tr[data-case]")];
  const apply = () => {
    const { case: part, below, worse, ...selects } = Object.fromEntries(new FormData(form));
    for (const row of rows) {
      const { dataset } = row;
      row.hidden = !(
        dataset.case.toLowerCase().includes(part.toLowerCase()) && (below === "" || dataset.dice < Number(below)) &&
        (!worse || dataset.delta < 0) && Object.entries(selects).every(([name, value]) => value === "" || dataset[name] === value)
      );
    }
    const left = rows.filter((row) => !row.hidden);
    const known = new Set(rows.map((row) => row.dataset.case)), cases = new Set(left.map((row) => row.dataset.case));
    for (const one of document.querySelectorAll("figure[data-case]")) one.hidden = known.has(one.dataset.case) && !cases.has(one.dataset.case);
    form.querySelector("output").textContent = left.length < rows.length ? `${left.length} of ${rows.length} rows` : "";
    setSignal("shown", left.length < rows.length ? left.map((row) => Number(row.dataset.row)) : null);
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
}
for (const button of document.querySelectorAll(".pictures button")) {
  button.addEventListener("click", () => {
    button.setAttribute("aria-expanded", String(button.closest("figure").classList.toggle("wide")));
  });
}
