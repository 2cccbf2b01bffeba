"use strict";
// The theme, and tables that sort. Plots are drawn by the next script, which listens to "theme".

const root = document.documentElement;
const darkByDefault = matchMedia("(prefers-color-scheme: dark)");

function remembered() {
  try { return localStorage.getItem("headlab-theme"); } catch { return null; }
}

function setTheme(theme) {
  root.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "Light theme" : "Dark theme";
  document.dispatchEvent(new Event("theme"));
}

function chosenTheme() {
  return remembered() || (darkByDefault.matches ? "dark" : "light");
}

document.getElementById("theme").addEventListener("click", () => {
  const theme = root.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("headlab-theme", theme); } catch { /* a page opened from a file may not remember */ }
  setTheme(theme);
});
darkByDefault.addEventListener("change", () => setTheme(chosenTheme()));
addEventListener("beforeprint", () => setTheme("light"));
addEventListener("afterprint", () => setTheme(chosenTheme()));
setTheme(chosenTheme());

function sortKey(cell) {
  const key = cell.dataset.key;
  if (key === "inf") return Infinity;
  return key !== undefined && key !== "" && !Number.isNaN(Number(key)) ? Number(key) : cell.textContent;
}

function compareKeys(a, b) {
  if (typeof a === "number" && typeof b === "number") return a === b ? 0 : a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

function sortBy(heading) {
  const table = heading.closest("table");
  const column = heading.cellIndex;
  const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
  const keyed = [...table.tBodies[0].rows].map((row) => [sortKey(row.cells[column]), row]);
  keyed.sort(([a], [b]) => {
    // what is not known stands last either way
    if (a === Infinity || b === Infinity) return (a === Infinity) - (b === Infinity);
    return sign * compareKeys(a, b);
  });
  table.tBodies[0].append(...keyed.map(([, row]) => row));
}

for (const button of document.querySelectorAll(".sort")) {
  button.addEventListener("click", () => sortBy(button.closest("th")));
}
