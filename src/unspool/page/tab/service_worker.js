// Keeps the page for use without a network, and isolates it from other origins, so that the engine can have threads.
// `unspool page --static` puts VERSION and FILES before this text and writes it beside the document as sw.js. The engine
// stores the model itself.

const PREFIX = "unspool-page-";

addEventListener("install", (event) => {
  const fresh = FILES.map((name) => new Request(name, { cache: "reload" }));
  event.waitUntil(caches.open(PREFIX + VERSION).then((cache) => cache.addAll(fresh)));
});

addEventListener("activate", (event) => {
  const dropOthers = async () => {
    for (const name of await caches.keys()) if (name.startsWith(PREFIX) && name !== PREFIX + VERSION) await caches.delete(name);
    await clients.claim();
  };
  event.waitUntil(dropOthers());
});

function isolated({ body, status, headers }) {
  const all = new Headers(headers);
  all.set("cross-origin-opener-policy", "same-origin");
  all.set("cross-origin-embedder-policy", "require-corp");
  return new Response(body, { status, headers: all });
}

addEventListener("fetch", (event) => {
  const { request } = event;
  const url = new URL(request.url);
  if (request.method !== "GET" || url.origin !== location.origin || url.pathname.endsWith(".gguf")) return;
  const answer = async () => {
    const cache = await caches.open(PREFIX + VERSION);
    const kept = request.mode === "navigate" ? await cache.match("./") : await cache.match(request, { ignoreSearch: true });
    const response = kept ?? await fetch(request);
    return response.ok ? isolated(response) : response;
  };
  event.respondWith(answer());
});
