// Tables of pages with `class="sortable"`: a click on a head sorts by that column, the text field keeps rows that contain its words.
(() => {
  const value = (row, column) => row.cells[column].textContent.trim();
  const number = (text) => (/^[-+]?[\d.,]/.test(text) ? parseFloat(text.replace(/,/g, "")) : NaN);
  const compare = (a, b) => {
    const [x, y] = [number(a), number(b)];
    if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
    return Number.isNaN(x) - Number.isNaN(y) || a.localeCompare(b);
  };

  function sort(table, column, head) {
    const down = head.getAttribute("aria-sort") === "ascending";
    table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows].sort((a, b) => compare(value(a, column), value(b, column)));
    table.tBodies[0].append(...(down ? rows.reverse() : rows));
  }

  function filter(table, words) {
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    table.querySelectorAll("th").forEach((head, column) => head.querySelector("button").addEventListener("click", () => sort(table, column, head)));
    const field = Object.assign(document.createElement("input"), { type: "search", placeholder: "Filter rows", className: "table-filter" });
    field.setAttribute("aria-label", "Filter rows");
    field.addEventListener("input", () => filter(table, field.value.toLowerCase().split(/\s+/).filter(Boolean)));
    table.parentElement.before(field);
  }
})();
