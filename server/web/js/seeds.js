/** Seeds: the day's, the largest, and those that visitors and links give. */

/** The seed of the day (UTC), such as 20260131: everybody gets the same traffic. */
export const today = () => Number(new Date().toISOString().slice(0, 10).replaceAll("-", ""));

export const MAX_SEED = 2 ** 53 - 1;

/** Whether a text is a seed. */
export const isSeed = (text) => /^\d+$/.test(text) && Number(text) <= MAX_SEED;

/** The seed in a field. Throws an error for the visitor if the field holds no seed. */
export function seedOf({ value }) {
  if (!isSeed(value)) throw { message: `The seed must be a whole number from 0 to ${MAX_SEED}`, next: "enter another one" };
  return Number(value);
}
