// Brings the pieces of one kind and version (WIDGET) to life, each once: a script element does not know where it
// stands in every notebook, so it looks for all that are still asleep.
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Response(stream).json();
}

// Notebooks have themes that the system knows nothing of; what they paint behind us tells.
function schemeBehind(host) {
  if (getComputedStyle(host).colorScheme !== 'normal') return 'inherit';
  for (let node = host.parentElement; node; node = node.parentElement) {
    const [red, green, blue, alpha = 1] = getComputedStyle(node).backgroundColor.match(/[\d.]+/g).map(Number);
    if (alpha > 0.5) return 0.3 * red + 0.6 * green + 0.1 * blue < 110 ? 'dark' : 'light';
  }
  return 'light dark';
}

async function wake(host) {
  const data = await unpacked(host.querySelector('script').textContent);
  host.style.colorScheme = schemeBehind(host);
  // Keys typed here are no commands of the notebook.
  host.addEventListener('keydown', (event) => event.stopPropagation());
  const root = host.attachShadow({ mode: 'open' });
  root.innerHTML = MARKUP;
  start(root, data);
}

for (const host of document.querySelectorAll(`[data-scalax="${WIDGET}"]:not([data-awake])`)) {
  host.dataset.awake = '';
  wake(host);
}
