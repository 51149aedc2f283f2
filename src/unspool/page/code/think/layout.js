// Where the texts of a search lie. Pure: a tree in, places out, no page.
//
// Each piece is a column further right than what it continues. A text that nothing follows has a row of its own, and
// stands alone in it to the right; what is continued stands in the row of its first continuation.

/**
 * `nodes` by number, of which those are drawn that `shows(number)` lets. Gives `{items, rows, columns}`; an item is
 * `{node, row, column, level, place, siblings, isLeaf}`, parents before their children, rows from above.
 */
export function laidOut(nodes, shows) {
  const items = [];
  let rows = 0;
  let columns = 0;
  const put = (number, column, place, siblings) => {
    const node = nodes[number];
    const children = node.children.filter(shows);
    const item = { node, column, row: rows, level: column + 1, place, siblings, isLeaf: children.length === 0 };
    items.push(item);
    columns = Math.max(columns, column + 1);
    children.forEach((child, at) => put(child, column + 1, at + 1, children.length));
    if (item.isLeaf) rows += 1;
  };
  if (nodes.length) put(0, 0, 1, 1);
  return { items, rows, columns };
}
