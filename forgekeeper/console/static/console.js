// Renew what is live once a second, as long as somebody can see it.
"use strict";

const EVERY = 1000; // milliseconds from an answer to the next question

function renew() {
  const live = document.querySelector("#live[data-live]");
  if (live && !document.hidden) {
    htmx.trigger(live, "renew");
  } else {
    setTimeout(renew, EVERY);
  }
}

// Also after an error: the server may be back. A page with an error is shown, too: it says what is wrong.
document.addEventListener("htmx:afterRequest", () => setTimeout(renew, EVERY));
document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.xhr.status >= 400) event.detail.shouldSwap = true;
});
document.addEventListener("DOMContentLoaded", () => setTimeout(renew, EVERY));
