"use strict";
// A click on a column's name sorts the rows by it, and a second click turns the order round.
function value(row, column) {
  const text = row.cells[column].textContent.trim().replaceAll("−", "-").replaceAll(",", "");
  const number = text.match(/(?:^|: )(-?\+?\d+(?:\.\d+)?(?:e[-+]?\d+)?)(?!\w)/);
  return { text, number: number ? Number(number[1].replace("+", "")) : text === "-" || text === "" ? -Infinity : NaN };
}
function sort(table, header, column) {
  const isDescending = header.getAttribute("aria-sort") === "ascending";
  const rows = [...table.tBodies[0].rows].map(row => [value(row, column), row]);
  const isOfNumbers = rows.every(([found]) => !Number.isNaN(found.number));
  rows.sort(([a], [b]) => isOfNumbers ? a.number - b.number || 0 : a.text.localeCompare(b.text, "en", { numeric: true }));
  if (isDescending) rows.reverse();
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
  table.tBodies[0].append(...rows.map(([, row]) => row));
}
for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort by this column";
    button.append(...header.childNodes);
    button.addEventListener("click", () => sort(table, header, column));
    header.append(button);
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(part => { part.open = true; }));
