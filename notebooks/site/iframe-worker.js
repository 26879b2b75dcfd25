// A page that is opened as a file may start no worker, and the search is one: an iframe takes its place.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.body.appendChild(Object.assign(document.createElement("iframe"), { hidden: true }))
      const inside = this.frame.contentWindow
      const load = (address) =>
        new Promise((loaded) => {
          const script = Object.assign(inside.document.createElement("script"), { src: address, onload: loaded })
          inside.document.body.append(script)
        })
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...addresses) => Promise.all(addresses.map(load))
      this.ready = load(new URL(url, location))
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
