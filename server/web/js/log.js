/** A log that one tab passes to another. */
export const handed = { text: "" };
