// Browsers start no worker from a page on disk, and the search is one. Here an invisible frame runs it instead; with a server, nothing changes.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #waiting = [];

    constructor(address) {
      super();
      const source = new URL(address, location.href).href;
      this.#frame.hidden = true;
      this.#frame.title = "search";
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow;
      inside.postMessage = (data) => this.#told(data);
      inside.importScripts = (...files) => Promise.all(files.map((file) => this.#script(inside, new URL(file, source).href)));
      inside.addEventListener("error", (event) => this.dispatchEvent(new ErrorEvent("error", { message: event.message })));
      this.#script(inside, source).then(() => {
        for (const data of this.#waiting) this.#send(data);
        this.#waiting = null;
      });
    }

    postMessage(data) {
      if (this.#waiting) this.#waiting.push(data);
      else this.#send(data);
    }

    terminate() {
      this.#frame.remove();
    }

    #send(data) {
      const inside = this.#frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }

    #told(data) {
      const event = new MessageEvent("message", { data });
      this.onmessage?.(event);
      this.dispatchEvent(event);
    }

    #script(inside, source) {
      return new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src: source, onload: resolve, onerror: () => reject(new Error(`cannot load ${source}`)) });
        inside.document.head.append(script);
      });
    }
  };
}
