// Wakes the parts of a notebook of one kind and version (PART), each once: a script element does not know where it
// stands in every notebook, so it looks for all that are still asleep.

// Notebooks have themes that the system knows nothing of; what they paint behind us tells.
function schemeBehind(host) {
  if (getComputedStyle(host).colorScheme !== 'normal') return 'inherit';
  for (let node = host.parentElement; node; node = node.parentElement) {
    const [red, green, blue, alpha = 1] = getComputedStyle(node).backgroundColor.match(/[\d.]+/g).map(Number);
    if (alpha > 0.5) return 0.3 * red + 0.6 * green + 0.1 * blue < 110 ? 'dark' : 'light';
  }
  return 'light dark';
}

for (const host of document.querySelectorAll(`[data-scalax="${PART}"]:not([data-awake])`)) {
  host.dataset.awake = '';
  host.style.colorScheme = schemeBehind(host);
  // Keys typed here are no commands of the notebook.
  host.addEventListener('keydown', (event) => event.stopPropagation());
  const root = host.attachShadow({ mode: 'open' });
  root.innerHTML = `<style>${STYLE}</style><div class="blocks"></div>`;
  const blocks = root.querySelector('.blocks');
  blocks.append(...host.querySelector('.scalax-static').childNodes);
  enliven(blocks);
}
