"""The engine of the browser tab in Chromium, beside wllama: python bench/tab.py [--wllama FOLDER]

Both read the default model's file in the same browser, one after the other, with `--threads`.
FOLDER is `node_modules/@wllama/wllama/esm` after `npm install @wllama/wllama`. Prints for each the
seconds to load the model, to read a prompt, and the tokens/s of a text after it.
"""

from __future__ import annotations

import argparse
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from playwright.sync_api import sync_playwright

from unspool.model.hub.find import find_model
from unspool.page.files import FOLDER

CHROMIUM = "/usr/bin/chromium"
PROMPT = "The quick brown fox jumps over the lazy dog and then sleeps. " * 8
WORKER = """
import { Engine } from "/tab/engine.js";
onmessage = async ({ data: [prompt, count, threads] }) => {
  const seconds = [performance.now()];
  const engine = await Engine.open({ source: "/model.gguf", threads });
  if (engine.info.threads !== threads) throw new Error("the threads have not started");
  seconds.push(performance.now());
  const ids = engine.tokenize(prompt);
  const branch = engine.branch();
  let logits = branch.append(ids);
  seconds.push(performance.now());
  for (let n = 0; n < count; n++) {
    const at = { history: branch.tokens, promptLength: ids.length, position: branch.length };
    logits = branch.append([engine.sample(logits, { temperature: 0 }, at).token]);
  }
  seconds.push(performance.now());
  postMessage([ids.length, ...seconds.map((value) => value / 1000)]);
};
"""
OURS = """(input) => new Promise((done, failed) => {
  const worker = new Worker("/worker.js", { type: "module" });
  worker.onmessage = ({ data }) => done(data);
  worker.onerror = ({ message }) => failed(new Error(message));
  worker.postMessage(input);
})"""
WLLAMA = """async ([prompt, count, threads]) => {
  const { Wllama } = await import("/wllama/index.js");
  const seconds = [performance.now()];
  const engine = new Wllama({ default: "/wllama/wasm/wllama.wasm" }, { suppressNativeLog: true });
  const blob = await (await fetch("/model.gguf")).blob();
  await engine.loadModel([blob], { n_ctx: 2048, n_threads: threads });
  seconds.push(performance.now());
  const options = { prompt, temperature: 0, cache_prompt: true, ignore_eos: true };
  const first = await engine.createCompletion({ ...options, max_tokens: 1 });
  seconds.push(performance.now());
  await engine.createCompletion({ ...options, max_tokens: count });
  seconds.push(performance.now());
  return [first.usage.prompt_tokens, ...seconds.map((value) => value / 1000)];
}"""


class Files(SimpleHTTPRequestHandler):
    """Serves a folder without a log."""

    extensions_map: ClassVar[dict[str, str]] = {
        **SimpleHTTPRequestHandler.extensions_map,
        ".js": "text/javascript",
        ".wasm": "application/wasm",
    }

    def end_headers(self) -> None:
        self.send_header("cross-origin-opener-policy", "same-origin")
        self.send_header("cross-origin-embedder-policy", "require-corp")
        super().end_headers()

    def log_message(self, *args: Any) -> None:
        pass


def measure(script: str, address: str, tokens: int, threads: int) -> tuple[int, list[float]]:
    """Tokens of the prompt, and seconds: to load the model, to read it, to write."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"{address}/index.html")
        count, *times = page.evaluate(script, [PROMPT, tokens, threads])
        browser.close()
    return count, [end - start for start, end in pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--wllama", type=Path, help="folder esm of the package @wllama/wllama")
    parser.add_argument("--tokens", type=int, default=40, help="of the text after the prompt")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "index.html").write_text("<!doctype html><title>bench</title>")
        (folder / "worker.js").write_text(WORKER)
        (folder / "tab").symlink_to(FOLDER / "tab")
        (folder / "model.gguf").symlink_to(find_model(None))
        engines = {"Unspool": OURS}
        if options.wllama is not None:
            (folder / "wllama").symlink_to(options.wllama.resolve())
            engines["wllama"] = WLLAMA
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=name))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for engine, script in engines.items():
            address = f"http://127.0.0.1:{server.server_port}"
            count, (load, prompt, write) = measure(script, address, options.tokens, options.threads)
            print(
                f"{engine}: load {load:.2f} s, prompt of {count} tokens {prompt:.2f} s, "
                f"{options.tokens / write:.1f} tokens/s",
                flush=True,
            )
        server.shutdown()


if __name__ == "__main__":
    main()
