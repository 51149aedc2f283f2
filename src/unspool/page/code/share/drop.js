// A session's file that is dropped anywhere on the page.

let reader = null; // who reads it: the dialog, once it is open
let waiting = null;

/** Read what is dropped from now on, and what was dropped before; gives the function that ends it. */
export function readDropped(read) {
  reader = read;
  if (waiting) read(waiting);
  waiting = null;
  return () => { reader = null; };
}

/** Listen on the whole page; `opened` shows the dialog that reads the file. */
export function listenForFiles(opened) {
  const isFile = (event) => event.dataTransfer?.types.includes("Files");
  const over = (event) => {
    if (isFile(event)) event.preventDefault(); // or the browser would leave the page for the file
  };
  const dropped = (event) => {
    if (!isFile(event) || event.defaultPrevented) return;
    event.preventDefault();
    const [file] = event.dataTransfer.files;
    if (!file) return;
    if (reader) reader(file);
    else waiting = file;
    opened();
  };
  addEventListener("dragover", over);
  addEventListener("drop", dropped);
  return () => {
    removeEventListener("dragover", over);
    removeEventListener("drop", dropped);
  };
}
