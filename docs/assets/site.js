// What the theme leaves unnamed or out of the keyboard's reach.
document.querySelector(".md-search").setAttribute("aria-label", "Search");
for (const nav of document.querySelectorAll("nav.md-nav[aria-labelledby]")) {
  if (!document.getElementById(nav.getAttribute("aria-labelledby"))?.textContent.trim()) {
    nav.removeAttribute("aria-labelledby");
    nav.setAttribute("aria-label", nav.querySelector(".md-nav__title").textContent.trim());
  }
}
function repair() {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) table.tabIndex = 0;
  document.querySelectorAll("nav.md-code__nav").forEach((buttons, k) => (buttons.ariaLabel = `Code block ${k + 1}`));
}
new MutationObserver(repair).observe(document.body, { childList: true, subtree: true }); // the theme adds them later
