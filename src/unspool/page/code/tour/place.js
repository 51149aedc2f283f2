// Where the card goes: beside what it speaks of, and never over it.

const SPACE = 16;
export const NARROW = 700; // px: below this the card lies at the bottom

/**
 * The place of a card of this size in a window of that size, and the part of the target that the ring
 * can go around. On a narrow screen the card lies at the bottom, and the ring stays above it.
 */
export function placed(target, card, view) {
  if (view.width < NARROW) {
    const top = view.height - card.height - 8;
    return { x: (view.width - card.width) / 2, y: top, ring: within(target, { top: 0, bottom: top - 8 }) };
  }
  const ring = within(target, { top: 0, bottom: view.height });
  const low = Math.min(Math.max(ring.bottom - card.height, SPACE), view.height - card.height - SPACE);
  const middle = Math.min(Math.max(SPACE, ring.left), view.width - card.width - SPACE);
  const sides = [
    { x: ring.left, y: ring.bottom + SPACE, fits: ring.bottom + card.height + 2 * SPACE <= view.height, small: true },
    { x: ring.right + SPACE, y: low, fits: ring.right + card.width + 2 * SPACE <= view.width },
    { x: ring.left - card.width - SPACE, y: low, fits: ring.left - card.width - 2 * SPACE >= 0 },
    { x: middle, y: ring.bottom + SPACE, fits: ring.bottom + card.height + 2 * SPACE <= view.height },
    { x: middle, y: ring.top - card.height - SPACE, fits: ring.top - card.height - 2 * SPACE >= 0 },
  ];
  const side = sides.find(({ fits, small }) => fits && (!small || ring.height < 160));
  const found = side ?? { x: view.width - card.width - SPACE, y: view.height - card.height - SPACE };
  return { x: Math.min(Math.max(SPACE, found.x), view.width - card.width - SPACE), y: found.y, ring };
}

function within(box, { top, bottom }) {
  const from = Math.max(box.top, top);
  const to = Math.max(from, Math.min(box.bottom, bottom));
  return { left: box.left, right: box.right, top: from, bottom: to, width: box.width, height: to - from };
}
