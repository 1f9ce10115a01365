'use strict';
(() => {
const runs = JSON.parse(document.getElementById('data').textContent);
const note = document.getElementById('note'), panels = [...document.querySelectorAll('.panel svg')];
const known = new Map();  // panel -> [row, x, y] of each dot, read from its paths when it is first needed

function dots(panel) {
  if (!known.has(panel)) known.set(panel, [...panel.querySelectorAll('path[data-rows]')].flatMap(path => {
    const places = path.getAttribute('d').split('M').slice(1);
    const numbers = place => place.replace('h0', '').split(' ').map(Number);
    return path.dataset.rows.split(',').map((row, n) => [Number(row), ...numbers(places[n])]);
  }));
  return known.get(panel);
}

function ring(panel, row) {
  const dot = row === null ? undefined : dots(panel).find(entry => entry[0] === row);
  let mark = panel.querySelector('.ring');
  if (!mark) {
    if (!dot) return;
    mark = document.createElementNS('http://www.w3.org/2000/svg', 'circle');
    mark.setAttribute('class', 'ring'); mark.setAttribute('r', 6); panel.append(mark);
  }
  mark.setAttribute('visibility', dot ? 'visible' : 'hidden');
  if (dot) { mark.setAttribute('cx', dot[1]); mark.setAttribute('cy', dot[2]); }
}

let marked = null;
function markEverywhere(row) {
  if (row === marked) return;
  marked = row;
  for (const panel of panels) ring(panel, row);
}

function near(panel, event) {
  const box = panel.getBoundingClientRect(), scale = panel.viewBox.baseVal.width / box.width;
  const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
  let row = null, least = 14 ** 2;
  for (const [own, dx, dy] of dots(panel)) {
    const distance = (dx - x) ** 2 + (dy - y) ** 2;
    if (distance < least) { least = distance; row = own; }
  }
  return row;
}

for (const panel of panels) {
  panel.addEventListener('pointermove', event => {
    const row = near(panel, event);
    markEverywhere(row); note.hidden = row === null;
    panel.classList.toggle('link', row !== null && Boolean(runs[row].link));
    if (row === null) return;
    note.textContent = runs[row].said;
    const below = event.clientY + note.offsetHeight + 24 <= innerHeight;
    note.style.left = Math.max(8, Math.min(event.clientX + 14, innerWidth - note.offsetWidth - 8)) + 'px';
    note.style.top = (below ? event.clientY + 16 : event.clientY - note.offsetHeight - 12) + 'px';
  });
  panel.addEventListener('pointerleave', () => { note.hidden = true; markEverywhere(null); });
  panel.addEventListener('click', event => {
    const row = near(panel, event);
    if (row !== null && runs[row].link) location.href = runs[row].link;
  });
}

function sort(button) {
  const head = button.closest('th'), table = button.closest('table'), body = table.tBodies[0];
  const sign = head.getAttribute('aria-sort') === 'ascending' ? -1 : 1;
  for (const other of head.parentElement.cells) other.removeAttribute('aria-sort');
  head.setAttribute('aria-sort', sign > 0 ? 'ascending' : 'descending');
  const key = row => row.cells[head.cellIndex].dataset.v ?? row.cells[head.cellIndex].textContent;
  const compare = (a, b) => a !== '' && b !== '' && !isNaN(a) && !isNaN(b) ? a - b : String(a).localeCompare(b);
  const keyed = [...body.rows].map(row => [key(row), row]);
  body.append(...keyed.sort((a, b) => sign * compare(a[0], b[0])).map(entry => entry[1]));
}
for (const button of document.querySelectorAll('.sortable th button')) {
  button.addEventListener('click', () => sort(button));
}
})();
