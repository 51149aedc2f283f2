// Ask the site's own search, without a browser: runs Material's search worker in Node.
//   node search.js build/site < queries.json     (a list of texts; prints a list of lists of pages)
const fs = require("fs"), path = require("path"), vm = require("vm")

const { plainQuery } = require("../assets/iframe-worker.js")

const site = process.argv[2]
const folder = path.join(site, "assets/javascripts/workers")
const worker = fs.readdirSync(folder).find(name => /^search\..*\.js$/.test(name))
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"))
const queries = JSON.parse(fs.readFileSync(0, "utf8"))

// The globals of a Web Worker, as far as the script uses them.
const listeners = [], waiting = []
const scope = {
  console, setTimeout, clearTimeout, URL, Intl,
  location: new URL("http://localhost/assets/javascripts/workers/" + worker),
  addEventListener: (kind, listener) => kind === "message" && listeners.push(listener),
  postMessage: data => waiting.shift()(data),
  importScripts: () => {},
}
scope.self = scope.globalThis = scope
vm.runInNewContext(fs.readFileSync(path.join(folder, worker), "utf8"), scope)

const ask = message => new Promise(resolve => {
  waiting.push(resolve)
  for (const listener of listeners) listener({ data: message })
})

async function main() {
  await ask({ type: 0, data: { config: index.config, docs: index.docs, options: { suggest: false } } })
  const results = []
  for (const query of queries) {
    const reply = await ask({ type: 2, data: plainQuery(query) })
    results.push(reply.data.items.map(group => group[0].location.split("#")[0]))
  }
  console.log(JSON.stringify(results))
}
main()
