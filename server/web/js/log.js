/** A log that one tab hands to another. */
export const handed = { text: "" };
