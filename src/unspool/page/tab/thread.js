// One more thread of the library: a worker on the same memory, with its own stack. It computes until it is terminated.

import { instantiate } from "./native.js";

addEventListener("message", async ({ data: { module, memory, tls, stack, index } }) => {
  const { exports } = await instantiate(module, memory);
  exports.__stack_pointer.value = stack;
  exports.__wasm_init_tls(tls);
  postMessage("ready");
  exports.unspool_work(index);
});
