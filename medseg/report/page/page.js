"use strict";
// Sort a table by a column: numbers as numbers, empty cells last.
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const sign = head.getAttribute("aria-sort") !== "ascending" ? 1 : -1;
    for (const other of heads) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const textOf = (row) => row.cells[column].dataset.order ?? row.cells[column].textContent;
    const compare = (a, b) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      // The difference of texts that are no numbers is NaN, which counts as false.
      return sign * (a - b || a.localeCompare(b, "en", { numeric: true }));
    };
    const rows = [...table.tBodies[0].rows];
    // A row that is appended again is moved.
    table.tBodies[0].append(...rows.sort((first, second) => compare(textOf(first), textOf(second))));
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
  for (const row of document.querySelectorAll("tbody tr")) row.classList.toggle("lit", setting !== null && row.dataset.setting === setting);
  setSignal("lit", setting === null ? null : Number(setting));
};
for (const element of document.querySelectorAll(".legend button, tbody tr[data-setting]")) {
  element.addEventListener("pointerenter", () => show(element.dataset.setting));
  element.addEventListener("pointerleave", () => show(kept));
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
    // Fields of the form: part of a case's name, largest Dice, only worse than the baseline, and values of selected columns.
    const { case: part, below, worse, ...selects } = Object.fromEntries(new FormData(form));
    for (const row of rows) {
      const { dataset } = row;
      const hasName = dataset.case.toLowerCase().includes(part.toLowerCase());
      const isBelow = below === "" || dataset.dice < Number(below);
      const isWorse = !worse || dataset.delta < 0;
      const hasValues = Object.entries(selects).every(([name, value]) => value === "" || dataset[name] === value);
      row.hidden = !(hasName && isBelow && isWorse && hasValues);
    }
    const left = rows.filter((row) => !row.hidden);
    // A picture of a case without a row stays.
    const allCases = new Set(rows.map((row) => row.dataset.case)), leftCases = new Set(left.map((row) => row.dataset.case));
    for (const figure of document.querySelectorAll("figure[data-case]")) {
      figure.hidden = allCases.has(figure.dataset.case) && !leftCases.has(figure.dataset.case);
    }
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
