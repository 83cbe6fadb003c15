document.addEventListener("DOMContentLoaded", () => {
  // Both side bars are landmarks and need names.
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "Site");
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", "On this page");
  // Sphinx formats long signatures as definition lists without terms, which are not valid lists.
  for (const list of document.querySelectorAll(".sig dl")) {
    const parameters = document.createElement("div");
    parameters.className = "parameters";
    for (const each of [...list.children]) {
      parameters.appendChild(document.createElement("div")).append(...each.childNodes);
    }
    list.replaceWith(parameters);
  }
  // Empty cells of headers, as pandas writes them, are not headers.
  for (const each of document.querySelectorAll("th")) {
    if (!each.textContent.trim()) {
      each.replaceWith(document.createElement("td"));
    }
  }
  // The keyboard can scroll whatever is wider than the page.
  for (const each of document.querySelectorAll(".highlight pre, .highlight, .table-wrapper, .drawing, .chart")) {
    if (each.scrollWidth > each.clientWidth) {
      each.tabIndex = 0;
    }
  }
});
