// What the theme leaves without a name or out of reach of the keyboard.
const named = () => {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap:not([role])")) {
    table.tabIndex = 0;
    table.setAttribute("role", "region");
    table.setAttribute("aria-label", "Table");
  }
};
document.querySelector("[data-md-component=search]")?.setAttribute("aria-label", "Search");
for (const code of document.querySelectorAll("pre > code")) code.tabIndex = 0;
named();
new MutationObserver(named).observe(document.body, { childList: true, subtree: true }); // the theme wraps tables when they come into view
