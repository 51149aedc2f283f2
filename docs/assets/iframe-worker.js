// Two additions to the search of MkDocs Material. Loaded before its scripts, and by docs/site/search.js.

// 1. Questions: words such as "how do I" are left out, since search looks for each word as a prefix
// ("i" would find "infill"), and endings are cut, so that "deterministic" finds "determinism".
const IGNORED = new Set((
  "a about an and any are as at be by can could do does for from get give have how i if in into is it " +
  "its make many me my much need not of on one or our should show so some tell than that the their " +
  "them then there these they this to use using want was we what when where which who why will with " +
  "you your"
).split(" "))

function plainQuery(query) {
  if (/["+:~^*]|(^|\s)-/.test(query)) return query // the syntax of the search engine
  const words = query.split(/[\s?!.,;]+/).filter(Boolean)
  const kept = words.filter(word => !IGNORED.has(word.toLowerCase()))
  const stem = word => /^[a-z]+$/.test(word) ? word.replace(/^(.{5,})(tic|m)$|^(.{4,})(ing|ed|s)$/, "$1$3") : word
  return (kept.length ? kept : words).map(word => stem(word.toLowerCase())).join(" ")
}

if (typeof module === "object") module.exports = { plainQuery }

if (typeof window === "object") {
  // 2. A site that is opened from a folder: browsers refuse Web Workers for file:// addresses, so the
  // worker's script runs in a hidden frame with the same messages.
  if (location.protocol === "file:") {
    window.Worker = class FrameWorker extends EventTarget {
      constructor(url) {
        super()
        this.frame = document.createElement("iframe")
        this.frame.hidden = true
        document.body.append(this.frame)
        const inside = this.frame.contentWindow
        // The worker answers through its global postMessage.
        inside.postMessage = data => {
          const event = new MessageEvent("message", { data })
          this.dispatchEvent(event)
          this.onmessage?.(event)
        }
        this.ready = new Promise((resolve, reject) => {
          const script = this.frame.contentDocument.createElement("script")
          script.src = url
          script.onload = resolve
          script.onerror = reject
          this.frame.contentDocument.body.append(script)
        })
      }
      postMessage(data) {
        this.ready.then(() =>
          this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
      }
      terminate() {
        this.frame.remove()
      }
    }
  }

  const QUERY = 2 // the message of Material's search that carries a query
  const send = Worker.prototype.postMessage
  Worker.prototype.postMessage = function (message, ...others) {
    const isQuery = message?.type === QUERY && typeof message.data === "string"
    return send.call(this, isQuery ? { ...message, data: plainQuery(message.data) } : message, ...others)
  }
}
