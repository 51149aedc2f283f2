/** A file that cannot be read; its message is shown. */
export class BadFile extends Error {}
