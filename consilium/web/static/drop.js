// Sends files that are dropped on the part marked data-drop, or chosen in it, one after the other; page.js shows what came of them.
"use strict";
(() => {
  const zone = document.querySelector("[data-drop]");
  const input = zone?.querySelector("input[type=file]");
  const told = zone?.querySelector("[role=status]");
  if (!input || !told) return;
  const waiting = [];
  const failed = [];
  let done = 0;
  let busy = false;

  const next = () => {
    const file = waiting.shift();
    if (!file) {
      busy = false;
      told.textContent = failed.length ? `Not classified: ${failed.join("; ")}` : `${done} ${done === 1 ? "file" : "files"} done.`;
      return;
    }
    busy = true;
    told.textContent = `${file.name}, and ${waiting.length} more`;
    const request = new XMLHttpRequest();
    request.open("POST", zone.dataset.drop);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.setRequestHeader("X-Token", document.body.dataset.session);
    request.setRequestHeader("X-Name", encodeURIComponent(file.name));
    request.onloadend = () => {
      if (request.status === 204) done += 1;
      else failed.push(`${file.name} (${request.responseText.trim() || "no answer: a folder, too large a file, or the program has ended"})`);
      next();
    };
    request.send(file);
  };

  const take = (files) => {
    if (!busy) {
      done = 0;
      failed.length = 0;
    }
    waiting.push(...files);
    if (!busy) next();
  };

  input.addEventListener("change", () => {
    take(input.files);
    input.value = "";
  });
  for (const kind of ["dragenter", "dragover"]) {
    zone.addEventListener(kind, (event) => {
      event.preventDefault();
      zone.classList.add("over");
    });
  }
  zone.addEventListener("dragleave", (event) => {
    if (!zone.contains(event.relatedTarget)) zone.classList.remove("over");
  });
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    take(event.dataTransfer.files);
  });
  // A file that misses the part would replace the page.
  for (const kind of ["dragover", "drop"]) window.addEventListener(kind, (event) => event.preventDefault());
})();
