/** An error that the page shows. `code`: no_simd, memory, not_a_model, unsupported_model, network, damaged,
 * unsupported_setting. */
export class TabError extends Error {
  constructor(code, message) {
    super(message);
    this.name = "TabError";
    this.code = code;
  }
}
