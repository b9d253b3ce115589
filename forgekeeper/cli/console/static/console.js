// Renew the live part of the page twice a second while the page is visible.
"use strict";

const EVERY = 500; // milliseconds from an answer to the next request
const LATE = 1500; // milliseconds without an answer until the page says so
let next, late;

function renew() {
  const live = document.querySelector("#live[data-live]");
  // A page that becomes visible again starts again, see below.
  if (!live || document.hidden) return;
  clearTimeout(late);
  late = setTimeout(() => lost(true), LATE);
  htmx.trigger(live, "renew");
}

// One timer for all callers: a page has one request at a time.
function later() {
  clearTimeout(next);
  next = setTimeout(renew, EVERY);
}

function lost(so) {
  clearTimeout(late);
  document.getElementById("lost").hidden = !so;
}

// Also after an error: the server may be back.
document.addEventListener("htmx:afterRequest", (event) => {
  if (event.target.id === "live") later();
});
document.addEventListener("htmx:sendError", () => lost(true));
document.addEventListener("htmx:timeout", () => lost(true));
document.addEventListener("htmx:beforeSwap", (event) => {
  // Pages with an error are shown, too: they say what is wrong.  Pages of other programs are not.
  const page = event.detail.xhr.responseText.includes('id="live"');
  event.detail.isError = false;
  event.detail.shouldSwap = page;
  lost(!page);
});
document.addEventListener("visibilitychange", renew);
window.addEventListener("pageshow", later);

// Keep opened details, and typed or chosen values.
function touched(field) {
  if (field.type === "checkbox" || field.type === "radio") return field.checked !== field.defaultChecked;
  if (field.options) return [...field.options].some((option) => option.selected !== option.defaultSelected);
  return field.value !== field.defaultValue;
}
Object.assign(Idiomorph.defaults.callbacks, {
  beforeNodeMorphed: (old) => !(old.matches?.("input, textarea, select") && (old === document.activeElement || touched(old))),
  beforeAttributeUpdated: (name, node) => !(name === "open" && node.matches("details")),
});
