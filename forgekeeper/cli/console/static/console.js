// Renew what is live twice a second, as long as somebody can see it.
"use strict";

const EVERY = 500; // milliseconds from an answer to the next question
const LATE = 1500; // milliseconds after which a question without an answer is told of
let next, late;

function renew() {
  const live = document.querySelector("#live[data-live]");
  // A page that is shown again begins again, see below.
  if (!live || document.hidden) return;
  clearTimeout(late);
  late = setTimeout(() => lost(true), LATE);
  htmx.trigger(live, "renew");
}

// One timer, however many things ask for it: a page asks one question at a time.
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
  // A page with an error is shown, too: it says what is wrong.  What is no page of the console's takes nothing's place.
  const page = event.detail.xhr.responseText.includes('id="live"');
  event.detail.isError = false;
  event.detail.shouldSwap = page;
  lost(!page);
});
document.addEventListener("visibilitychange", renew);
window.addEventListener("pageshow", later);

// What a person has opened, typed or chosen stays so.
function touched(field) {
  if (field.type === "checkbox" || field.type === "radio") return field.checked !== field.defaultChecked;
  if (field.options) return [...field.options].some((option) => option.selected !== option.defaultSelected);
  return field.value !== field.defaultValue;
}
Object.assign(Idiomorph.defaults.callbacks, {
  beforeNodeMorphed: (old) => !(old.matches?.("input, textarea, select") && (old === document.activeElement || touched(old))),
  beforeAttributeUpdated: (name, node) => !(name === "open" && node.matches("details")),
});
