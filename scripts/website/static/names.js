// What the theme leaves without a name or out of reach of the keyboard.
document.querySelector("[data-md-component=search]")?.setAttribute("aria-label", "Search");
for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) {
  table.tabIndex = 0;
  table.setAttribute("role", "region");
  table.setAttribute("aria-label", "Table");
}
for (const code of document.querySelectorAll("pre > code")) code.tabIndex = 0;
