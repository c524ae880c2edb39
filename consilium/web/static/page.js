// Keeps an open page up to date. Without it the page works as well: load it again to see what is new.
"use strict";
(() => {
  const lost = document.getElementById("lost");
  let source = null;
  let pending = false;

  // Take over each part marked live that differs; the keyboard's place stays where it was.
  const take = (fresh) => {
    // Whoever else listens here once this page's program has ended does not know the session's token.
    if (fresh.body?.dataset.session !== document.body.dataset.session) return;
    for (const part of fresh.querySelectorAll("[data-live]")) {
      const old = document.getElementById(part.id);
      if (!old || old.isEqualNode(part)) continue;
      const open = new Set([...old.querySelectorAll("details[open][id]")].map((d) => d.id));
      const focus = old.contains(document.activeElement) ? document.activeElement.id : "";
      const node = document.importNode(part, true);
      for (const details of node.querySelectorAll("details[id]")) details.open ||= open.has(details.id);
      old.replaceWith(node);
      if (focus) document.getElementById(focus)?.focus();
    }
    document.body.dataset.version = fresh.body.dataset.version;
  };

  const refresh = () => {
    if (pending) return;
    pending = true;
    const request = new XMLHttpRequest(); // parses by itself: no text of ours becomes markup
    request.open("GET", location.href);
    request.responseType = "document";
    request.onloadend = () => {
      pending = false;
      if (request.status === 200 && request.response) take(request.response);
    };
    request.send();
  };

  const watch = () => {
    if (document.hidden || !window.EventSource) {
      source?.close();
      source = null;
    } else if (!source) {
      source = new EventSource("/changed");
      source.onopen = () => { lost.hidden = true; };
      source.onerror = () => { lost.hidden = false; };
      source.addEventListener("changed", (event) => {
        if (event.data !== document.body.dataset.version) refresh();
      });
    }
  };

  document.addEventListener("visibilitychange", watch);
  watch();
})();
