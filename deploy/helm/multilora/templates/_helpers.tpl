{{- define "multilora.labels" -}}
app.kubernetes.io/name: multilora
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "multilora.selector" -}}
app.kubernetes.io/name: multilora
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* The container's resources, limited to one device of the configured name (which requests it too). */ -}}
{{- define "multilora.resources" -}}
{{- $resources := deepCopy (.Values.resources | default dict) -}}
{{- with .Values.device.resource -}}
{{- $limits := get $resources "limits" | default dict -}}
{{- $_ := set $limits . 1 -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{- define "multilora.sharedClaim" -}}
{{- .Values.adapterStore.existingClaim | default (printf "%s-adapters" .Release.Name) -}}
{{- end }}

{{- define "multilora.claim" -}}
accessModes: [{{ .accessMode | default "ReadWriteOnce" }}]
{{- with .storageClassName }}
storageClassName: {{ . | quote }}
{{- end }}
resources:
  requests:
    storage: {{ .size }}
{{- end }}
