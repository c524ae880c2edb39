// Browsers start no Worker from a file, and the site's search is one. Here a hidden frame runs its script, so that the search works without a server.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const base = new URL(url, location.href);
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      const load = (source) =>
        new Promise((loaded, failed) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src: new URL(source, base).href, onload: loaded, onerror: failed });
          inside.document.head.append(script);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      this.frame = frame;
      this.ready = load(base.href);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
