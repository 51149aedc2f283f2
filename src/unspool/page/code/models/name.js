// A model's name and size as there is room for them.

/** Without the owner of the repository. */
export const shortName = (id) => id?.split("/").at(-1) ?? "";

export function bytes(count) {
  if (!count) return "";
  const [unit, by] = count >= 1e9 ? ["GB", 1e9] : ["MB", 1e6];
  const value = count / by;
  return `${value.toFixed(value < 10 && by === 1e9 ? 1 : 0)} ${unit}`;
}
