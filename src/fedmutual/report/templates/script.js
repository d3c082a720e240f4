// What a picture says where it is pointed at or touched: its own titles, else the row of its table.
const tip = document.body.appendChild(Object.assign(document.createElement("p"), { id: "tip", hidden: true }));
for (const title of document.querySelectorAll(".plot title")) {
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}
const row = (rect) => {
  const table = rect.closest("figure").querySelector("table");
  const cells = table.tBodies[0].rows[[...rect.parentNode.querySelectorAll("rect")].indexOf(rect)].cells;
  const heads = table.tHead.rows[0].cells;
  return [...cells].map((cell, k) => `${heads[k].textContent} ${cell.textContent || "n/a"}`).join("\n");
};
const show = (event) => {
  const rect = event.target.closest?.(".plot rect");
  tip.hidden = !rect;
  if (!rect) return;
  tip.textContent = rect.dataset.tip ??= row(rect);
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 4))}px`;
};
for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, show);
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
