"use strict";
// Sort a table by a column: numbers as numbers, empty cells last.
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending" ? 1 : -1;
    for (const other of heads) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", up > 0 ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows].map((row) => [row, row.cells[column].dataset.order ?? ""]);
    rows.sort(([, a], [, b]) => (a === "") - (b === "") || up * (a - b || a.localeCompare(b, "en", { numeric: true }) || 0));
    table.tBodies[0].append(...rows.map(([row]) => row));
  }));
}
// Bring one setting to the front in all charts and tables: under the pointer, or kept by a click on the legend.
let kept = null;
const show = (setting) => {
  for (const charts of document.querySelectorAll(".charts")) charts.classList.toggle("focus", setting !== null);
  for (const one of document.querySelectorAll(".series, tbody tr")) one.classList.toggle("lit", setting !== null && one.classList.contains("s" + setting));
};
for (const one of document.querySelectorAll(".legend button, tbody tr")) {
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
for (const button of document.querySelectorAll(".pictures button")) {
  button.addEventListener("click", () => {
    button.setAttribute("aria-expanded", String(button.closest("figure").classList.toggle("wide")));
  });
}
