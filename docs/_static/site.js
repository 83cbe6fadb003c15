// The keyboard can scroll whatever is wider than the page.
document.addEventListener("DOMContentLoaded", () => {
  for (const each of document.querySelectorAll(".highlight pre, .highlight, .table-wrapper, .drawing, .chart")) {
    if (each.scrollWidth > each.clientWidth) {
      each.tabIndex = 0;
    }
  }
});
