/**
 * What is kept outside the tabs: a log that one tab passes to another, and what a reload shows again, in the session storage.
 * Storage may be denied, as within a frame: the reload then starts anew.
 */

export const handed = { text: "" };

/** Keep `value` under a name for an address (its part from the `#`); null keeps nothing. */
export function keep(name, hash, value) {
  try {
    if (value) sessionStorage.setItem(name, JSON.stringify({ hash, value }));
    else sessionStorage.removeItem(name);
  } catch { /* denied or full */ }
}

/** Take what was kept for this address; null if there is nothing. */
export function takeKept(name) {
  try {
    const kept = JSON.parse(sessionStorage.getItem(name));
    sessionStorage.removeItem(name);
    return kept?.hash === location.hash ? kept.value : null;
  } catch {
    return null; // denied
  }
}
