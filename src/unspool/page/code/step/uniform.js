// The number that the draw at a position uses: a pure function of seed, sample and position, so that a
// step that drew nothing (greedy, or chosen by a person) still has the number it would have drawn.
// The same arithmetic as the server's: Philox4x32-10, ten rounds over four 32-bit words.

const WORD = 0xffffffffn;

export function uniform(seed, sample, position) {
  const bits = BigInt.asUintN(64, BigInt(seed));
  let [k0, k1] = [bits & WORD, bits >> 32n];
  const wide = BigInt.asUintN(64, BigInt(sample));
  let words = [BigInt(position) & WORD, wide & WORD, wide >> 32n, 0n];
  for (let round = 0; round < 10; round += 1) {
    const p0 = words[0] * 0xd2511f53n;
    const p1 = words[2] * 0xcd9e8d57n;
    words = [(p1 >> 32n) ^ words[1] ^ k0, p1 & WORD, (p0 >> 32n) ^ words[3] ^ k1, p0 & WORD];
    k0 = (k0 + 0x9e3779b9n) & WORD;
    k1 = (k1 + 0xbb67ae85n) & WORD;
  }
  return Number(((words[0] << 32n) | words[1]) >> 11n) * 2 ** -53;
}
